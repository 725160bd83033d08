"""Streams and events: who waited for whom, and tensors that are not to be looked at yet.

There are two streams, the one that computes and an engine's own. What an engine started is NaN until its event was
waited for, and what it reads must not change until then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from emulation.errors import EmulationError

COMPUTE, COMM = "compute", "communication"

# (who waits, whom for, what for), in order.
EDGES: list[tuple[str, str, str]] = []
# (what happens, on which stream), in order: "start dispatch", "wait dispatch", ...
LOG: list[tuple[str, str]] = []
GARBAGE = -(2**30)


def forget() -> None:
    """Start the records anew."""
    EDGES.clear()
    LOG.clear()


class Event:
    """A point of a stream that another stream can wait for.

    Args:
        label: what happens before it.
        stream: on which stream.
    """

    def __init__(self, label: str = "recorded", stream: str = COMPUTE) -> None:
        self.label = label
        self.stream = stream
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._inputs: list[tuple[Tensor, Tensor]] = []

    def hides(self, tensors: Iterable[Tensor | None]) -> None:
        """Make tensors NaN, or garbage, until somebody waits for this event."""
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                self._hidden.append((tensor, tensor.clone()))
                # `.data` leaves version counters alone, as a kernel of another stream does.
                tensor.data.fill_(float("nan") if tensor.is_floating_point() else GARBAGE)

    def reads(self, tensors: Iterable[Tensor | None]) -> None:
        """Note that tensors are being read until somebody waits for this event."""
        self._inputs.extend((tensor, tensor.detach().clone()) for tensor in tensors if tensor is not None)

    def wait(self, by: str = COMPUTE) -> None:
        """Let a stream wait. Again is allowed and does nothing."""
        if by == self.stream:
            raise EmulationError("stream_wait: the two streams are the same one")
        EDGES.append((by, self.stream, self.label))
        LOG.append((f"wait {self.label}", by))
        for tensor, before in self._inputs:
            if not torch.equal(torch.nan_to_num(tensor.detach()), torch.nan_to_num(before)):
                raise EmulationError(f"an input of {self.label} was overwritten while the engine was reading it")
        for tensor, real in self._hidden:
            tensor.data.copy_(real)
        self._hidden.clear()
        self._inputs.clear()


def started(
    label: str, outputs: Iterable[Tensor | None], inputs: Iterable[Tensor | None], is_async: bool
) -> Event | None:
    """What a call on the engine's stream leaves behind: an event if it is asynchronous; else the caller has waited."""
    LOG.append((f"start {label}", COMM))
    event = Event(label, COMM)
    if not is_async:
        EDGES.append((COMPUTE, COMM, label))
        LOG.append((f"wait {label}", COMPUTE))
        return None
    event.hides(outputs)
    event.reads(inputs)
    return event
