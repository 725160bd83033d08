"""Who takes part, and what each of them has to say: host-side talk between the processes of a job."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def world(group: ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in the group and the group's size; `(0, 1)` without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def num_ranks() -> int:
    """How many processes there are, all of which have tokens of their own."""
    return world()[1]


def gather(value: T, group: ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in rank order, on every rank. Collective; `[value]` without torch.distributed.

    The other ranks of PyTorch's backend `fake`, which does not have any, say what this one does.
    """
    _, size = world(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [value] * size
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
