"""What an emulation raises."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """Something that the real engine refuses, hangs on, or computes wrongly without a word."""


def require(condition: bool, real: str) -> None:
    """Raise unless a condition holds.

    Args:
        condition: what has to hold.
        real: the assertion or the hazard of the real engine that this stands for.
    """
    if not condition:
        raise EmulationError(real)
