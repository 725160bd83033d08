"""Where rows go: what the engines that sort tokens by expert have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emulation.collective import Checked

_ORDER = torch.Generator().manual_seed(0)


@dataclass(frozen=True, eq=False)
class Rows:
    """One layout: a row for each (token, expert) pair, sorted by expert. Within an expert the order is anybody's guess.

    Attributes:
        ranks: the collectives of the engine object.
        num_tokens: `T`.
        token: `[sent]`, the token of each pair that this rank sends, by expert.
        expert: `[sent]`, its expert.
        send_sizes, recv_sizes: pairs to and from each rank.
        slots: `[received]`, the row of each received pair.
        counts: `[L]`, rows of each local expert, with their padding.
    """

    ranks: Checked
    num_tokens: int
    token: Tensor
    expert: Tensor
    num_experts: int
    send_sizes: list[int]
    recv_sizes: list[int]
    slots: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls, ranks: Checked, num_tokens: int, token: Tensor, expert: Tensor, num_experts: int, multiple: int
    ) -> Rows:
        """Collective.

        Args:
            token, expert: `[sent]`, sorted by expert.
            multiple: what each expert's rows are padded to; 1 for no padding.
        """
        num_local = num_experts // ranks.size
        send_sizes = torch.bincount(expert // num_local, minlength=ranks.size).tolist()
        recv_sizes = ranks.sizes(send_sizes)
        local = ranks.all_to_all(expert, recv_sizes, send_sizes) - ranks.rank * num_local
        real = torch.bincount(local, minlength=num_local)
        counts = (real + multiple - 1) // multiple * multiple
        shuffled = torch.randperm(len(local), generator=_ORDER)
        order = shuffled[local[shuffled].argsort(stable=True)]
        nth = torch.arange(len(local)) - (real.cumsum(0) - real)[local[order]]
        slots = torch.empty_like(local)
        slots[order] = (counts.cumsum(0) - counts)[local[order]] + nth
        return cls(ranks, num_tokens, token, expert, num_experts, send_sizes, recv_sizes, slots, counts)

    @property
    def num_rows(self) -> int:
        """`P`."""
        return int(self.counts.sum())

    def there(self, values: Tensor, gaps: float) -> Tensor:
        """Values of pairs `[sent, ...]` to the ranks of the experts: `[P, ...]`, with `gaps` where no pair is."""
        arrived = self.ranks.all_to_all(values, self.recv_sizes, self.send_sizes)
        rows = values.new_full((self.num_rows, *values.shape[1:]), gaps)
        rows[self.slots] = arrived
        return rows

    def back(self, rows: Tensor) -> Tensor:
        """`[P, ...]` back to the pairs they were sent for: `[sent, ...]`."""
        return self.ranks.all_to_all(rows[self.slots], self.send_sizes, self.recv_sizes)

    def summed(self, rows: Tensor) -> Tensor:
        """`[P, width]` back, added up by token: `[T, width]`. NaN for a token that no expert was picked for.

        Each rank adds its rows up in float32 and rounds; then the ranks' sums are added up in float32 and rounded.
        """
        of_rank = torch.zeros(self.num_tokens, self.ranks.size, rows.shape[1])
        source = self.expert // (self.num_experts // self.ranks.size)
        of_rank.index_put_((self.token, source), self.back(rows).float(), accumulate=True)
        total = of_rank.to(rows.dtype).float().sum(1).to(rows.dtype)
        nowhere = torch.bincount(self.token, minlength=self.num_tokens) == 0
        return total.masked_fill(nowhere.unsqueeze(1), float("nan"))
