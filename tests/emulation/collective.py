"""Collectives that fail where the real ones would hang."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from emulation.errors import EmulationError

# Calls by operation, on this rank.
CALLS: Counter[str] = Counter()


class Checked:
    """The collectives of one engine object over one group.

    Args:
        group: whose ranks must all make the same calls.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._sequence = 0

    def check(self, operation: str, **facts: Any) -> list[dict[str, Any]]:
        """Note a call, and raise if another rank does something else. Collective.

        Args:
            operation: what is called.
            facts: what has to be the same on all ranks.
        """
        CALLS[operation] += 1
        self._sequence += 1
        mine = dict(operation=operation, sequence=self._sequence, **facts)
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine, group=self.group)
        if any(other != mine for other in everybody):
            raise EmulationError(f"the ranks would wait for each other forever: {everybody}")
        return everybody

    def all_to_all(self, rows: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> Tensor:
        """`[sum(send_sizes), ...]` to `[sum(recv_sizes), ...]`."""
        received = rows.new_empty((sum(recv_sizes), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), recv_sizes, send_sizes, group=self.group)
        return received

    def sizes(self, send_sizes: list[int]) -> list[int]:
        """How many rows each rank sends here."""
        mine, theirs = torch.tensor(send_sizes), torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.tolist()
