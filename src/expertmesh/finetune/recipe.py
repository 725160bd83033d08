"""The recipe of a fine-tune: every choice with its default, and the refusals that need no library and no weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from expertmesh.errors import ConfigError
from expertmesh.finetune.lora import LoraRecipe

PYTHON_DOCS = "python-docs"
AUTO, NONE = "auto", "none"
CHECKPOINT = "checkpoint-"
MODEL_CONFIGS = ("config.json", "adapter_config.json")
FILE_BUILDERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_CHOICES = {
    "lr_schedule": ("linear", "cosine", "constant", "constant_with_warmup"),
    "dtype": ("float32", "bfloat16"),
    "mixed_precision": ("no", "bf16"),
}
_AT_LEAST_ONE = (
    "sequence_length",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "sample_tokens",
)
_NOT_NEGATIVE = ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One supervised fine-tune. Each annotation's text is what `--help` shows and docs/finetune.md lists."""

    model: Annotated[str | None, "model to start from: a folder or a hub name"] = None
    model_config: Annotated[dict[str, Any] | None, "instead of `model`: a configuration, given random weights"] = None
    tokenizer: Annotated[str | dict[str, Any] | None, "folder, hub name, or {train_bpe: SIZE}; default: model's"] = None
    chat_template: Annotated[str | None, "file with a Jinja chat template; default: the tokenizer's"] = None

    lora: Annotated[LoraRecipe | None, "train adapters only: a mapping, {} for all defaults"] = None

    data: Annotated[str | None, "file (.txt .md .jsonl .json .parquet), folder, hub name or python-docs"] = None
    data_split: Annotated[str, "split to train on, where the data has splits"] = "train"
    eval_fraction: Annotated[float, "share of the documents, from the end, that is held out; 0: none"] = 0.05
    text_column: Annotated[str, "column with the text"] = "text"
    messages_column: Annotated[str | None, "column with chats (lists of role and content), instead of text"] = None
    packing: Annotated[bool, "join documents and cut full sequences; false: pad each document"] = True
    sequence_length: Annotated[int, "tokens in a sequence; longer documents are cut when packing is off"] = 1024

    per_device_batch_size: Annotated[int, "sequences per rank and micro batch"] = 4
    gradient_accumulation_steps: Annotated[int, "micro batches per optimizer step"] = 1
    learning_rate: Annotated[float, "peak learning rate of AdamW"] = 2e-5
    lr_schedule: Annotated[str, "linear, cosine, constant or constant_with_warmup"] = "cosine"
    warmup_steps: Annotated[int, "steps in which the learning rate rises from 0"] = 0
    weight_decay: Annotated[float, "AdamW's weight decay"] = 0.0
    max_grad_norm: Annotated[float, "gradients are clipped to this norm; 0: no clipping"] = 1.0
    epochs: Annotated[float, "passes over the training data; ignored when max_steps is given"] = 1.0
    max_steps: Annotated[int | None, "optimizer steps"] = None
    seed: Annotated[int, "seed of random weights and of the data order"] = 0
    dtype: Annotated[str, "dtype of weights and optimizer state: float32 or bfloat16"] = "float32"
    mixed_precision: Annotated[str | None, "compute dtype: no or bf16; default: as launched"] = None
    activation_checkpointing: Annotated[bool, "recompute activations in the backward pass to save memory"] = False

    output_dir: Annotated[
        str | None, "folder for the finished model, in Hugging Face format, or for PEFT's adapters"
    ] = None
    overwrite: Annotated[bool, "replace the model and the checkpoints that output_dir holds"] = False
    save_steps: Annotated[int | None, "steps between two checkpoints; default: no checkpoints"] = None
    save_total_limit: Annotated[int | None, "most checkpoints to keep, the newest; default: all"] = None
    save_async: Annotated[bool, "write checkpoints in the background while training goes on"] = False
    resume: Annotated[str, "auto (newest complete checkpoint in output_dir, if any), none, or a checkpoint"] = "none"
    logging_steps: Annotated[int, "steps between two reports"] = 10
    eval_steps: Annotated[int | None, "steps between two evaluations; default: only before and after training"] = None
    sample_prompt: Annotated[str, "what the finished model is asked to continue (or, for chats, to answer)"] = "The"
    sample_tokens: Annotated[int, "most tokens in the sample"] = 64

    @property
    def output_path(self) -> Path:
        """Where the finished model goes. Only for a recipe that `validate` accepted."""
        return Path(str(self.output_dir))

    def validate(self) -> None:
        """Refuse what can be seen to fail without loading anything.

        Raises:
            ConfigError: says which key is wrong and what to change.
        """
        self._check_values()
        self._check_sources()
        self._check_checkpoints()
        self._check_output()

    def _check_values(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} {value!r} is unknown: choose among {', '.join(choices)}.")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}: correct it.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}: correct it.")
        if self.epochs <= 0:
            raise ConfigError(f"epochs must be more than 0, but is {self.epochs}: correct it.")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must be at least 0 and less than 1, but is {self.eval_fraction}.")
        if self.eval_steps and not self.eval_fraction:
            raise ConfigError("eval_steps needs held-out documents: set eval_fraction above 0, or drop eval_steps.")

    def _check_sources(self) -> None:
        if (self.model is None) == (self.model_config is None):
            raise ConfigError("give exactly one of `model` (a folder or hub name) and `model_config` (random weights).")
        if self.model_config is not None and "model_type" not in self.model_config:
            raise ConfigError("model_config needs a model_type, for instance `model_type: qwen3_moe`.")
        if isinstance(self.tokenizer, dict):
            _check_train_bpe(self.tokenizer)
        if self.model_config is not None and self.tokenizer is None:
            raise ConfigError("model_config has no tokenizer of its own: set `tokenizer`, e.g. {train_bpe: 4096}.")
        if self.lora is not None:
            self.lora.validate()
            if self.model is None:
                raise ConfigError("lora adapts a pretrained `model`, not model_config's random weights: remove one.")
        if self.data is None:
            raise ConfigError(f"`data` is missing: give a file, a `datasets` name, or {PYTHON_DOCS}.")
        if self.data == PYTHON_DOCS and self.messages_column is not None:
            raise ConfigError(f"{PYTHON_DOCS} has no chats: remove messages_column.")
        for name in ("data", "chat_template"):
            value = getattr(self, name)
            looks_like_a_file = value is not None and (name == "chat_template" or Path(value).suffix in FILE_BUILDERS)
            if looks_like_a_file and not Path(value).is_file():
                raise ConfigError(f"{name}: there is no file {value!r}: correct the path.")

    def _check_checkpoints(self) -> None:
        for name in ("save_total_limit", "save_async"):
            if getattr(self, name) and self.save_steps is None:
                raise ConfigError(f"{name} is about checkpoints, but none are written: set save_steps.")
        if self.resume not in (AUTO, NONE) and not Path(self.resume).is_dir():
            raise ConfigError(f"resume: there is no checkpoint {self.resume!r}: correct the path, or use `auto`.")

    def _check_output(self) -> None:
        if self.output_dir is None:
            raise ConfigError("`output_dir` is missing: name the folder for the finished model.")
        if "://" in self.output_dir:
            raise ConfigError(
                f"output_dir {self.output_dir!r} is a URL: name a folder, and `expertmesh export` the model from there."
            )
        output = self.output_path
        if output.exists() and not output.is_dir():
            raise ConfigError(f"output_dir {self.output_dir!r} is a file: name a folder.")
        entries = [path.name for path in output.iterdir()] if output.is_dir() else []
        others = [name for name in entries if not name.startswith(CHECKPOINT)]
        holds_model = any(name in others for name in MODEL_CONFIGS)
        if not entries or (self.resume != NONE and not holds_model):
            return
        if not others and not self.overwrite:
            raise ConfigError(
                f"output_dir {self.output_dir!r} holds checkpoints: set `resume: auto` to go on from the newest, or "
                f"`overwrite: true` to start without them."
            )
        if not self.overwrite:
            raise ConfigError(f"output_dir {self.output_dir!r} is not empty: name another, or set `overwrite: true`.")
        if others and not holds_model:
            raise ConfigError(
                f"output_dir {self.output_dir!r} holds something else than a model (it has no "
                f"{' and no '.join(MODEL_CONFIGS)}), so `overwrite: true` will not touch it: name another folder."
            )


def _check_train_bpe(tokenizer: dict[str, Any]) -> None:
    size = tokenizer.get("train_bpe")
    if set(tokenizer) != {"train_bpe"} or type(size) is not int or size < 300:
        raise ConfigError(
            f"tokenizer {tokenizer} is not understood: give a folder, a hub name or {{train_bpe: SIZE}} with a "
            f"vocabulary SIZE of at least 300."
        )
