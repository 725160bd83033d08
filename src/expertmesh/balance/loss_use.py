"""What becomes of a loss after a model has returned it, which who adds a term to it has to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LossUse:
    """The way from the loss of a rank's micro-batch to the gradients, apart from what averages over ranks.

    Attributes:
        multiplied: by what. Where a loss is the rank's share of the global loss (divided by the global number of
            tokens), this is the number of ranks, to survive averaging; what is global already has to be divided by it.
        micro_batches: how many make one optimizer step, where the caller does not leave it to `Accelerator.backward`
            to divide by them.
    """

    multiplied: int = 1
    micro_batches: int = 1


_current: ContextVar[LossUse] = ContextVar("expertmesh_loss_use", default=LossUse())  # noqa: B039


def loss_use() -> LossUse:
    """How the loss that is being computed will be used: as a mean, unless somebody says otherwise."""
    return _current.get()


@contextmanager
def loss_used(**changes: Any) -> Iterator[None]:
    """Say so, for the losses computed inside. Takes attributes of `LossUse`."""
    token = _current.set(replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(token)
