"""Reading a recipe: a YAML file, then `--key value` overrides, each checked against the recipe's types."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import Recipe

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
    recipe = Recipe(**_typed(values))
    recipe.validate()
    return recipe


def help_text() -> str:
    """The usage, examples, and a line for every key."""
    return _USAGE + "\n".join(f"  {key:<28} {text}{_shown(default)}" for key, text, default in explained_keys())


def explained_keys() -> list[tuple[str, str, object]]:
    """Every key of a recipe with its explanation and its default."""
    hints = get_type_hints(Recipe, include_extras=True)
    return [(item.name, hints[item.name].__metadata__[0], item.default) for item in fields(Recipe)]


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


def refuse_unknown(keys: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuse the first key that is not known.

    Raises:
        ConfigError: names the key and the nearest known one.
    """
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            hint = f"did you mean `{nearest[0]}`?" if nearest else "nothing is known here."
            raise ConfigError(f"{key!r} is not a key of {where}: {hint}")


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(Recipe)
    refuse_unknown(values, list(hints), "a recipe")
    return {key: _coerce(key, value, _alternatives(hints[key])) for key, value in values.items()}


def _alternatives(hint: Any) -> tuple[type, ...]:
    """`(str, dict, NoneType)` for `str | dict[str, Any] | None`."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(option) or option for option in options)


def _coerce(key: str, value: Any, accepted: tuple[type, ...]) -> Any:
    """The value as one of the accepted types. Only `1` and `1e-4` (a text in YAML 1.1) become floats.

    Raises:
        ConfigError: another type.
    """
    if type(value) in accepted:
        return value
    if float in accepted and type(value) in (int, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in accepted)
    raise ConfigError(f"{key} must be {names}, but is {value!r} ({type(value).__name__}): correct it.")
