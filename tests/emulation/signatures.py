"""How the real engines are called, as it was read from their sources, and whether something is called the same way.

`snapshots/<engine>.json` holds `{version, sha, classes: {class: {method: {params, returns}}}, functions, operators}`:
`params` is a list of `[name, kind, default]`, `returns` the number of values, an operator its schema.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

SNAPSHOTS = Path(__file__).parent / "snapshots"


def snapshot(engine: str) -> dict[str, Any]:
    """What the sources say."""
    return json.loads((SNAPSHOTS / f"{engine}.json").read_text())


def differences(module: types.ModuleType, said: dict[str, Any], with_returns: bool) -> list[str]:
    """Where a module, real or emulated, is called in another way than a snapshot says.

    Args:
        module: what has the classes and functions.
        said: the snapshot.
        with_returns: compare the number of returned values too, which only annotated functions tell.
    """
    named = {name: (getattr(module, name), what) for name, what in said.get("functions", {}).items()}
    for class_name, methods in said["classes"].items():
        for name, what in methods.items():
            named[f"{class_name}.{name}"] = getattr(getattr(module, class_name), name), what
    found = []
    for name, (function, what) in named.items():
        if parameters(function) != what["params"]:
            found.append(f"{name}{inspect.signature(function)}, and not with {what['params']}")
        if with_returns and arity(function) != what["returns"]:
            found.append(f"{name} returns {arity(function)} values, and not {what['returns']}")
    return found


def parameters(function: Callable) -> list[list[str]]:
    """`[name, kind, default]` of each parameter but `self`."""
    return [
        [one.name, one.kind.name, "required" if one.default is one.empty else repr(one.default)]
        for one in inspect.signature(function).parameters.values()
        if one.name != "self"
    ]


def arity(function: Callable) -> int:
    """How many values a function returns, by its annotation."""
    returned = typing.get_type_hints(function)["return"]
    if returned is types.NoneType:
        return 0
    return len(typing.get_args(returned)) if typing.get_origin(returned) is tuple else 1
