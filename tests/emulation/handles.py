"""Handles of engines that somebody still holds; each holds memory of the device."""

from __future__ import annotations

import weakref

ALIVE: weakref.WeakSet[Life] = weakref.WeakSet()


class Life:
    """What a handle keeps, for as long as it lives: a tuple, which some handles are, cannot be watched."""

    def __init__(self) -> None:
        ALIVE.add(self)
