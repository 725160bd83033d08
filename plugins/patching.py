"""How an adapter changes a method of its engine: only for objects that expert parallelism concerns, and only once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ORIGINAL = "__expertmesh_original__"


def divert(owner: type, name: str, ours: Callable[..., Any], concerns: Callable[[Any], bool]) -> None:
    """Let `ours(original, self, ...)` answer the method `owner.name` wherever `concerns(self)`; idempotent.

    `original` is the method as the engine defined it, still to be given `self`.
    """
    original = getattr(owner, name)
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not concerns(self):
            return original(self, *args, **kwargs)
        return ours(original, self, *args, **kwargs)

    setattr(method, _ORIGINAL, original)
    setattr(owner, name, method)
