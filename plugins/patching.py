"""How an adapter changes a method of its engine: only for objects that expert parallelism concerns, and only once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_DIVERSIONS = "__expertmesh_diversions__"


def divert(owner: type, name: str, ours: Callable[..., Any], concerns: Callable[[Any], bool]) -> None:
    """Let `ours(original, self, ...)` answer the method `owner.name` wherever `concerns(self)`; idempotent.

    `original` is the method as it was found, still to be given `self`: the engine's, or an earlier diversion of it.
    """
    original = getattr(owner, name)
    diversions = getattr(original, _DIVERSIONS, ())
    if ours in diversions:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not concerns(self):
            return original(self, *args, **kwargs)
        return ours(original, self, *args, **kwargs)

    setattr(method, _DIVERSIONS, (*diversions, ours))
    setattr(owner, name, method)
