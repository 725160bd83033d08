"""What a user can choose, and the refusals that need nothing but arithmetic.

One frozen dataclass holds every choice. It is built from keyword arguments, from the `parallelism_config:` block of an
Accelerate YAML, or from the environment that the launcher hands to its workers; all three spell a key the same way.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from expertmesh.errors import ConfigError

YAML_PREFIX = "parallelism_config_"
ENV_PREFIX = "PARALLELISM_CONFIG_"

# What a key may be where its values are few. Dispatchers, computes and layers are checked where they are found.
CHOICES = {
    # See `expertmesh.recompute`.
    "ep_activation_checkpointing": ("none", "selective", "full", "experts_only"),
    # `hf` makes every checkpoint a Hugging Face model; `dcp` writes the layout of Accelerate's FSDP2.
    "ep_checkpoint_format": ("hf", "dcp"),
    # Whose tokens a model's load-balancing loss is over: the whole batch's, or each rank's, as in data parallelism.
    "ep_balance_aux_loss": ("global", "local"),
    "ep_fp8_recipe": ("auto", "float8_current_scaling", "mxfp8"),
    # `hf` leaves a model its own loss on logits.
    "ep_loss": ("auto", "hf", "chunked", "liger"),
}

_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")

# Keys of the same YAML block that Accelerate itself reads and that do not concern expert parallelism.
ACCELERATE_KEYS = (
    "cp_backend",
    "cp_comm_strategy",
    "sp_size",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
)


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """Sizes of the mesh axes and the choices of expert parallelism (EP).

    The dense weights see the ranks as `(dp_replicate, dp_shard, cp, tp)`; the experts see the same ranks as
    `(dp_replicate, efsdp, ep)` with `efsdp * ep == dp_shard * cp`.

    Attributes:
        dp_replicate_size: replicas of the whole sharded model (HSDP).
        dp_shard_size: ranks that shard the dense weights (FSDP2); `None` takes all ranks the other sizes leave.
        cp_size: ranks that share one sequence (context parallelism).
        tp_size: ranks that share one layer (tensor parallelism); only 1 is supported together with EP.
        ep_size: ranks that share one layer's experts.
        ep_dispatcher: how tokens travel, a name registered in `expertmesh.dispatch`, or `auto`.
        ep_compute: how the experts are computed, a name registered in `expertmesh.compute`, or `auto`.
        ep_chunks: parts that a batch is cut into, so that one travels while another is computed.
        ep_overlap: compute shared experts while tokens travel, on a stream of their own.
        ep_activation_checkpointing: what each block keeps for the backward: everything (`none`), nothing but its
            routing (`full`), what is dear to get again too (`selective`), or everything but what its experts need
            (`experts_only`). Where the script or `fsdp_config` turns checkpointing on by itself, `none` means `full`.
        ep_layers: which implementation the layers around the experts use: the model's own (`hf`), the same with norms
            that keep less for the backward (`auto`), or a name registered in `expertmesh.layers`.
        ep_layers_only: the modules that may be replaced: patterns of qualified names, with commas between; empty for
            all.
        ep_layers_keep: those that stay, in the same form, beside routers and the head.
        ep_fp8_recipe: how values are scaled where Accelerate's `mixed_precision` is `fp8`.
        ep_loss: how the loss of a language model is taken without its logits; `hf` takes it from them.
        ep_checkpoint_format: what a training checkpoint is, a Hugging Face model (`hf`) or DCP as Accelerate's FSDP2
            writes it (`dcp`). Both resume on any mesh.
        ep_async_save: write checkpoints in the background, so that training waits only for a copy in host memory.
        ep_balance_aux_loss: over which tokens a model's own load-balancing loss is taken, `global` or `local`.
        ep_balance_bias_rate: what a router's correction bias moves by after an optimizer step; 0 leaves it alone.
        ep_z_loss: coefficient of the routers' z-loss; 0 adds none.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int | None = None
    cp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    ep_dispatcher: str = "auto"
    ep_compute: str = "auto"
    ep_chunks: int = 1
    ep_overlap: bool = True
    ep_activation_checkpointing: str = "none"
    ep_layers: str = "auto"
    ep_layers_only: str = ""
    ep_layers_keep: str = ""
    ep_fp8_recipe: str = "auto"
    ep_loss: str = "auto"
    ep_checkpoint_format: str = "hf"
    ep_async_save: bool = False
    ep_balance_aux_loss: str = "global"
    ep_balance_bias_rate: float = 0.0
    ep_z_loss: float = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ExpertParallelConfig:
        """Read the keys of a YAML block, with or without the prefix `parallelism_config_`.

        Keys that only Accelerate reads are skipped. Texts are converted, `-1` for `dp_shard_size` means "infer".

        Raises:
            ConfigError: an unknown key (the nearest known one is named), a size that is not an integer, a number that
                is none, a switch that is neither true nor false, or DeepSpeed's sequence parallelism.
        """
        refuse_unknown_keys(values)
        refuse_sequence_parallelism({_short(key): value for key, value in values.items()}.get("sp_size"))
        ours = {_short(key): value for key, value in values.items() if _short(key) not in ACCELERATE_KEYS}
        return cls(**{key: _parse(key, value) for key, value in ours.items()})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ExpertParallelConfig:
        """Read what the launcher exported. Variables that are not set keep their defaults.

        Raises:
            ConfigError: a size that is not an integer, a number that is none, or a switch that is neither true nor
                false.
        """
        names = {field.name: ENV_PREFIX + field.name.upper() for field in fields(cls)}
        return cls.from_mapping({key: environ[name] for key, name in names.items() if name in environ})

    def resolve(self, world_size: int) -> ExpertParallelConfig:
        """The same choices with `dp_shard_size` filled in, checked against the number of ranks.

        Raises:
            ConfigError: the sizes do not multiply to `world_size`, do not divide, or cannot be combined.
        """
        self._check_choices()
        others = self.dp_replicate_size * self.cp_size * self.tp_size
        dp_shard_size = self.dp_shard_size or max(world_size // others, 1)
        if others * dp_shard_size != world_size:
            raise ConfigError(
                f"dp_replicate_size {self.dp_replicate_size} x dp_shard_size {dp_shard_size} x cp_size {self.cp_size} "
                f"x tp_size {self.tp_size} is {others * dp_shard_size}, but {world_size} processes were started: "
                f"start {others * dp_shard_size} processes (`num_processes`), or change the sizes so that their "
                f"product is {world_size}. `ep_size` takes no part in it: experts borrow the dp_shard and cp ranks."
            )
        lenders = dp_shard_size * self.cp_size
        if lenders % self.ep_size:
            raise ConfigError(
                f"ep_size {self.ep_size} does not divide dp_shard_size x cp_size = {lenders}, the ranks that experts "
                f"are spread over: choose an ep_size among {_divisors(lenders)}."
            )
        return ExpertParallelConfig(**{**self.__dict__, "dp_shard_size": dp_shard_size})

    def validate(self, world_size: int) -> None:
        """Refuse what cannot work on `world_size` ranks; see `resolve`.

        Raises:
            ConfigError: as `resolve` does.
        """
        self.resolve(world_size)

    @property
    def efsdp_size(self) -> int:
        """Ranks that shard one expert's weights. Needs a resolved configuration."""
        if self.dp_shard_size is None:
            raise ConfigError("dp_shard_size is not known yet: call resolve(world_size) first.")
        return self.dp_shard_size * self.cp_size // self.ep_size

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Ranks along each axis, as a checkpoint records them. Needs a resolved configuration."""
        return {
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size * self.cp_size,
            "efsdp": self.efsdp_size,
            "ep": self.ep_size,
            "world_size": self.dp_replicate_size * self.dp_shard_size * self.cp_size * self.tp_size,
        }

    def _check_choices(self) -> None:
        for name in _of_type("int", "int | None"):
            size = getattr(self, name)
            if size is None and name == "dp_shard_size":
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, but is {size!r}: correct it.")
        if self.tp_size > 1:
            raise ConfigError(
                f"tp_size {self.tp_size} cannot be combined with expert parallelism yet: set tp_size to 1 and give "
                f"its ranks to dp_shard_size."
            )
        if self.cp_size > 1:
            raise ConfigError(
                f"cp_size {self.cp_size} cannot be combined with expert parallelism yet: set cp_size to 1 and give "
                f"its ranks to dp_shard_size."
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown: choose among {', '.join(choices)}.")
        for name in _of_type("bool"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, but is {getattr(self, name)!r}: correct it.")
        for name in _of_type("float"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0, but is {number!r}: correct it.")


def _of_type(*annotations: str) -> tuple[str, ...]:
    """The keys whose values are of a type."""
    return tuple(field.name for field in fields(ExpertParallelConfig) if field.type in annotations)


def _described() -> dict[str, str]:
    """What the docstring says about each key of expert parallelism; nothing where Python has dropped it."""
    text = inspect.getdoc(ExpertParallelConfig) or ""
    said = dict(re.findall(r"^    (ep_\w+): (.*(?:\n        .*)*)", text, re.MULTILINE))
    names = (field.name for field in fields(ExpertParallelConfig) if field.name.startswith("ep_"))
    return {name: re.sub(r"\s+", " ", said.get(name, "")).replace("`", "") for name in names}


# The keys of expert parallelism, each with a sentence for people.
EXPERT_KEYS = _described()
KNOWN_KEYS = tuple(field.name for field in fields(ExpertParallelConfig)) + ACCELERATE_KEYS


def refuse_unknown_keys(keys: Iterable[str]) -> None:
    """Refuse keys of a `parallelism_config:` block that nobody reads; Accelerate would drop them without a word.

    Raises:
        ConfigError: names the first unknown key and the nearest known one.
    """
    for key in keys:
        if _short(key) in KNOWN_KEYS:
            continue
        near = difflib.get_close_matches(_short(key), KNOWN_KEYS, n=1, cutoff=0.0)
        raise ConfigError(
            f"`{key}` in parallelism_config is not a known key: did you mean `{YAML_PREFIX}{near[0]}`? "
            f"Known keys: {', '.join(KNOWN_KEYS)} (each with the prefix `{YAML_PREFIX}`)."
        )


def refuse_sequence_parallelism(sp_size: object) -> None:
    """Refuse Accelerate's `sp_size`, whose groups DeepSpeed makes by itself, outside of any mesh.

    Raises:
        ConfigError: `sp_size` is set and not 1.
    """
    if sp_size is not None and str(sp_size) != "1":
        raise ConfigError(
            f"sp_size {sp_size} (DeepSpeed) cannot be combined with expert parallelism: set sp_size to 1."
        )


def _short(key: str) -> str:
    return key.removeprefix(YAML_PREFIX)


def _parse(key: str, value: object) -> object:
    return _PARSERS[ExpertParallelConfig.__dataclass_fields__[key].type](key, value)


def _parse_text(key: str, value: object) -> str:
    return str(value)


def _parse_integer(key: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{YAML_PREFIX}{key} must be an integer, but is {value!r}: correct it.") from None


def _parse_inferred(key: str, value: object) -> int | None:
    size = -1 if value is None else _parse_integer(key, value)
    return None if size == -1 else size


def _parse_switch(key: str, value: object) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ConfigError(f"{YAML_PREFIX}{key} must be true or false, but is {value!r}: correct it.")
    return text in _TRUE


def _parse_number(key: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"{YAML_PREFIX}{key} must be a number, but is {value!r}: correct it.") from None


# By the annotation of a key.
_PARSERS = {
    "bool": _parse_switch,
    "float": _parse_number,
    "int": _parse_integer,
    "int | None": _parse_inferred,
    "str": _parse_text,
}


def _divisors(number: int) -> str:
    return ", ".join(str(i) for i in range(1, number + 1) if number % i == 0)
