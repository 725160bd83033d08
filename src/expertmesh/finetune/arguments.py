"""Reading a recipe: a YAML file, then `--key value` overrides, each checked against the recipe's types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import Recipe
from expertmesh.finetune.values import alternatives, read_values

_USAGE = """\
Supervised fine-tuning of a Hugging Face causal language model on transformers.Trainer.

usage: python -m expertmesh.finetune [RECIPE.yaml] [--key value ...]

Started by `accelerate launch --config CONFIG.yaml -m expertmesh.finetune ...` it runs on all ranks, with expert
parallelism where CONFIG.yaml asks for it; the recipe stays the same.

examples:
  python -m expertmesh.finetune launch_configs/quickstart.yaml
  accelerate launch --config launch_configs/ep2_cpu.yaml -m expertmesh.finetune launch_configs/quickstart.yaml \\
      --max_steps 50 --output_dir outputs/short
  python -m expertmesh.finetune --model Qwen/Qwen3-30B-A3B --data chats.jsonl --messages_column messages \\
      --packing false --output_dir outputs/chat
  python -m expertmesh.finetune recipe.yaml --lora.r 32 --lora.targets "[attention, experts, router]"
  python -m expertmesh.finetune recipe.yaml --model_config.num_experts 32 --tokenizer "{train_bpe: 4096}"

keys (in the YAML file, or as --key value; --a.b value sets one entry of a mapping):
"""


def read_recipe(arguments: Sequence[str]) -> Recipe:
    """The validated recipe that a command line (without the program's name) describes.

    Raises:
        ConfigError: a file that is missing or no mapping, an unknown key, a wrong type, or a recipe that cannot work.
    """
    path, overrides = _split_arguments(arguments)
    values = _read_yaml(path) if path else {}
    for key, value in overrides:
        _assign(values, key, value)
    recipe = read_values(Recipe, values)
    recipe.validate()
    return recipe


def help_text() -> str:
    """The usage, examples, and a line for every key."""
    return _USAGE + "\n".join(f"  {key:<28} {text}{_shown(default)}" for key, text, default in explained_keys())


def explained_keys(kind: type = Recipe, prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Every key of a recipe, those of nested mappings too, with its explanation and its default."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        hint = hints[item.name]
        yield prefix + item.name, hint.__metadata__[0], item.default
        for nested in filter(is_dataclass, alternatives(hint.__origin__)):
            yield from explained_keys(nested, f"{prefix}{item.name}.")


def _shown(default: object) -> str:
    return "" if default is None else f" [{yaml.safe_dump(default).splitlines()[0]}]"


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether the user asks for help, or gives nothing to work with."""
    return not arguments or "-h" in arguments or "--help" in arguments


def _split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[tuple[str, Any]]]:
    """The recipe's path, if any, and the overrides in order."""
    path: Path | None = None
    overrides: list[tuple[str, Any]] = []
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("--"):
            if path is not None:
                raise ConfigError(f"two recipes were given, {str(path)!r} and {word!r}: give one.")
            path = Path(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = next(rest, None)
            if text is None:
                raise ConfigError(f"--{key} has no value: write `--{key} VALUE`.")
        overrides.append((key, _parse_yaml(text, f"--{key}")))
    return path, overrides


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no recipe {str(path)!r}: correct the path.")
    values = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a mapping of keys to values: see `python -m expertmesh.finetune --help`.")
    return values


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `values["a"]["b"]` for `a.b`. Mappings read from the file are copied, not changed."""
    key, dot, rest = dotted.replace("-", "_").partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.get(key) or {}
    if not isinstance(inner, dict):
        raise ConfigError(f"--{dotted}: `{key}` is {inner!r}, which has no entries: set `{key}` itself.")
    values[key] = inner = dict(inner)
    _assign(inner, rest, value)
