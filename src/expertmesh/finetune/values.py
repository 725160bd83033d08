"""Values that were read from YAML, as the fields of a dataclass."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from expertmesh.errors import ConfigError


def read_values(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of a dataclass with some of its fields set; mappings become the dataclasses that a field may hold.

    Args:
        kind: the dataclass.
        values: by name.
        prefix: put before names in an error, such as `lora.`.

    Raises:
        ConfigError: an unknown key or a wrong type.
    """
    hints = get_type_hints(kind)
    refuse_unknown(values, list(hints), f"`{prefix[:-1]}`" if prefix else "a recipe")
    return kind(**{key: _coerce(prefix + key, value, alternatives(hints[key])) for key, value in values.items()})


def alternatives(hint: Any) -> tuple[type, ...]:
    """`(str, dict, NoneType)` for `str | dict[str, Any] | None`."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(option) or option for option in options)


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


def _coerce(key: str, value: Any, accepted: tuple[type, ...]) -> Any:
    """The value as one of the accepted types. Only `1` and `1e-4` (a text in YAML 1.1) become floats.

    Raises:
        ConfigError: another type.
    """
    if type(value) in accepted:
        return value
    nested = [kind for kind in accepted if is_dataclass(kind)]
    if nested and type(value) is dict:
        return read_values(nested[0], value, f"{key}.")
    if float in accepted and type(value) in (int, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    names = " or ".join(_names(kind) for kind in accepted)
    raise ConfigError(f"{key} must be {names}, but is {value!r} ({type(value).__name__}): correct it.")


def _names(kind: type) -> str:
    if is_dataclass(kind):
        return "dict"
    return "nothing" if kind is type(None) else kind.__name__
