"""Putting an engine's layers in the place of a model's own, before anything is sharded: `ep_layers`.

What is replaced keeps its name and its very Parameters, so that state dicts, optimizers, adapters and deferred weights
do not notice. Never replaced are experts (`ep_compute` says who computes those), the head, routers and the gates of
shared experts, the small matrices of adapters, and modules with hooks or with a forward of their own.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError, some
from expertmesh.experts import find_experts
from expertmesh.extensions import Extensions
from expertmesh.ranks import world

logger = logging.getLogger(__name__)

# What wraps a module and is no part of its name: checkpointing, compilation, and PEFT's layers around others.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "base_layer")
# The values of ep_layers that leave a model its own modules.
OWN = ("auto", "hf")


@dataclass(frozen=True)
class Stays:
    """A module that an engine cannot take.

    Attributes:
        reason: in a few words.
    """

    reason: str


class Layers(ABC):
    """The layers of an engine, for one model.

    Args:
        config: the choices.
        device: where the model is computed.
        fp8: multiply in 8 bits, as `config.ep_fp8_recipe` says.

    Raises:
        ConfigError: 8 bits are not to be had here.
    """

    @classmethod
    @abstractmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Why the engine cannot be used here, with the remedy; None if it can. Never raises."""

    @abstractmethod
    def __init__(self, config: ExpertParallelConfig, device: torch.device, fp8: bool) -> None: ...

    @abstractmethod
    def prepare(self, model: nn.Module, experts: Mapping[str, nn.Module]) -> None:
        """Look at the whole model, and at its experts by qualified name, before the first module is offered."""

    @abstractmethod
    def replacement(self, module: nn.Module) -> nn.Module | Stays | None:
        """What stands in the place of a module from now on, with the same Parameter objects.

        `Stays` where the engine has such a layer and cannot take this one; None where it has none.
        """

    @abstractmethod
    def finish(self, model: nn.Module, stays: Sequence[nn.Module]) -> Mapping[str, Stays]:
        """Change what is no module, attention say, everywhere but in the modules that are to stay as they are.

        Returns:
            What could not be changed, by name.
        """


LAYERS: Extensions[Layers] = Extensions("ep_layers", "expertmesh.layers", {})


def check_layers(name: str) -> None:
    """Refuse layers that do not exist.

    Raises:
        ConfigError: names those that do.
    """
    if name not in OWN:
        LAYERS.check(name)


def replace_layers(model: nn.Module, config: ExpertParallelConfig, device: torch.device, fp8: bool = False) -> None:
    """Replace what `config.ep_layers` asks for. What cannot be replaced is listed once, in the log.

    Args:
        model: whole on this rank, nothing sharded yet; its weights may still be placeholders.
        config: the choices.
        device: where the model will be computed.
        fp8: multiply in 8 bits.

    Raises:
        ConfigError: the layers do not exist or cannot be used here, 8 bits without an engine that has them, or a
            pattern that fits no module.
    """
    if config.ep_layers in OWN:
        if fp8:
            raise ConfigError(
                f"mixed_precision fp8 needs layers that multiply in 8 bits, and ep_layers is {config.ep_layers}: set "
                f"ep_layers to te, or mixed_precision to bf16."
            )
        return
    kind = LAYERS.find(config.ep_layers)
    reason = kind.refusal(device)
    if reason is not None:
        raise ConfigError(f"ep_layers {config.ep_layers} cannot be used here: {reason}")
    engine = kind(config, device, fp8)
    names = {module: _plain(name) for name, module in model.named_modules()}
    allowed = _Allowed.of(config, list(names.values()))
    experts = find_experts(model)
    engine.prepare(model, experts)
    stay: dict[str, Stays] = {}
    for parent, attribute, module in list(_offered(model, experts)):
        if not allowed(names[module]):
            continue
        found = Stays("it has hooks or a forward of its own") if _is_changed(module) else None
        answer = engine.replacement(module)
        if isinstance(answer, Stays) or (answer is not None and found is not None):
            stay[names[module]] = found or answer
        elif answer is not None:
            setattr(parent, attribute, answer.train(module.training))
    stay |= engine.finish(model, [module for module, name in names.items() if not allowed(name)])
    if stay and world()[0] == 0:
        logger.warning("ep_layers %s: as they were stay %s", config.ep_layers, _listed(stay))


@dataclass(frozen=True)
class _Allowed:
    """Which modules may be replaced, by their qualified names."""

    only: tuple[str, ...]
    keep: tuple[str, ...]

    @classmethod
    def of(cls, config: ExpertParallelConfig, names: Sequence[str]) -> _Allowed:
        for key in ("ep_layers_only", "ep_layers_keep"):
            for pattern in _patterns(getattr(config, key)):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(f"{key}: {pattern!r} fits the name of no module of this model: correct it.")
        return cls(_patterns(config.ep_layers_only), _patterns(config.ep_layers_keep))

    def __call__(self, name: str) -> bool:
        """Whether the module of that name may be replaced."""
        chosen = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return chosen and not any(fnmatchcase(name, pattern) for pattern in self.keep)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())


def _plain(name: str) -> str:
    """A qualified name without what wraps modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _offered(model: nn.Module, experts: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """What may be replaced: parent, attribute, module."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    spared = {*experts.values(), *_routers(model, experts), *([] if head is None else [head])}
    yield from _below(model, spared)


def _below(parent: nn.Module, spared: set[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    # Around what PEFT has adapted lie matrices of its own.
    inner = getattr(parent, "base_layer", None)
    children = {"base_layer": inner} if isinstance(inner, nn.Module) else dict(parent.named_children())
    for attribute, module in children.items():
        if module not in spared:
            yield parent, attribute, module
            yield from _below(module, spared)


def _routers(model: nn.Module, experts: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """The linear layers that choose or weigh experts: as wide as there are experts, or one, and beside no others.

    Most families' routers hold a bare weight, and are no linear layer at all.
    """
    for name, module in experts.items():
        block = model.get_submodule(_block_of(name))
        num_experts = module.down_proj.shape[0]
        for parent in block.modules():
            linear = [child for child in parent.children() if isinstance(_inner(child), nn.Linear)]
            if parent is block or len(linear) == 1:
                yield from (child for child in linear if _inner(child).out_features in (1, num_experts))


def _block_of(name: str) -> str:
    parts = name.split(".")
    while parts and parts[-1] in _WRAPPERS:
        parts.pop()
    return ".".join(parts[:-1])


def _inner(module: nn.Module) -> nn.Module:
    return getattr(module, "base_layer", module)


def _is_changed(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(
        (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    )


def _listed(stay: Mapping[str, Stays]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, answer in stay.items():
        by_reason.setdefault(answer.reason, []).append(name)
    return "; ".join(f"{some(names)} ({reason})" for reason, names in by_reason.items())
