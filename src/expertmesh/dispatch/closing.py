"""Ending engines while all ranks are still there.

An engine's buffers are destroyed by all ranks together and over their process group, so before it.
"""

from __future__ import annotations

from collections.abc import Callable

_CLOSERS: list[Callable[[], None]] = []


def close_with_training(close: Callable[[], None]) -> None:
    """Let `close_engines` call a function too; an engine says so when it first needs something that has to be ended."""
    if close not in _CLOSERS:
        _CLOSERS.append(close)


def close_engines() -> None:
    """End what engines hold. Collective.

    `Accelerator.end_training` does it; a script that destroys its process group by itself should do it before.
    """
    while _CLOSERS:
        _CLOSERS.pop()()
