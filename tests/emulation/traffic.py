"""Where tokens go: what the engines that send a token once to each rank have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emulation.collective import Checked
from emulation.errors import require


@dataclass(frozen=True)
class Traffic:
    """One dispatch's traffic.

    Attributes:
        ranks: the collectives of the engine object.
        num_tokens: `T`.
        sent_token: `[sent]`, the token of each sent row, by destination rank.
        send_sizes, recv_sizes: rows to and from each rank.
        owner: `[T, K]`, the rank of each slot's expert, -1 for none.
    """

    ranks: Checked
    num_tokens: int
    sent_token: Tensor
    send_sizes: list[int]
    recv_sizes: list[int]
    owner: Tensor

    @classmethod
    def of(cls, ranks: Checked, topk_idx: Tensor, num_experts: int) -> Traffic:
        """Collective."""
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // ranks.size), -1)
        rows = [(owner == rank).any(1).nonzero()[:, 0] for rank in range(ranks.size)]
        send_sizes = [len(row) for row in rows]
        return cls(ranks, len(topk_idx), torch.cat(rows), send_sizes, ranks.sizes(send_sizes), owner)

    @property
    def num_received(self) -> int:
        """`N`."""
        return sum(self.recv_sizes)

    def there(self, rows: Tensor) -> Tensor:
        """`[T, ...]` to the ranks of the experts: `[N, ...]`, by source rank, then by token."""
        return self.ranks.all_to_all(rows[self.sent_token], self.recv_sizes, self.send_sizes)

    def back(self, rows: Tensor) -> Tensor:
        """`[N, width]` back and added up by token in float32: `[T, width]`."""
        returned = self.ranks.all_to_all(rows, self.send_sizes, self.recv_sizes)
        total = torch.zeros(self.num_tokens, rows.shape[1])
        return total.index_add_(0, self.sent_token, returned.float()).to(rows.dtype)

    def picked_back(self, weights: Tensor) -> Tensor:
        """`[N, K]` back, each slot taken from the rank that has its expert: `[T, K]`."""
        returned = self.ranks.all_to_all(weights, self.send_sizes, self.recv_sizes)
        source = torch.repeat_interleave(torch.arange(self.ranks.size), torch.tensor(self.send_sizes))
        mine = self.owner[self.sent_token] == source.unsqueeze(1)
        total = torch.zeros(self.num_tokens, weights.shape[1])
        return total.index_add_(0, self.sent_token, torch.where(mine, returned, 0))

    def local_ids(self, expert_ids: Tensor, num_experts: int) -> Tensor:
        """Received global ids as local ones, -1 for other ranks' experts."""
        num_local = num_experts // self.ranks.size
        local = expert_ids - self.ranks.rank * num_local
        return torch.where((expert_ids >= 0) & (local >= 0) & (local < num_local), local, -1)


def check_tokens(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """What every engine asserts of a matrix of tokens."""
    require(x.dim() == 2 and x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
    require(x.shape[1] * x.element_size() % 16 == 0, "x.size(1) * x.element_size() % sizeof(int4) == 0")
    require(x.dtype in dtypes, f"Unsupported type {x.dtype}")


def check_routing(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int) -> None:
    """What every engine asserts of a routing, and what crashes the device."""
    require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx->dim() == 2 and topk_idx->is_contiguous()")
    require(topk_idx.dtype == torch.int64, f"expected scalar type Long but found {topk_idx.dtype}")
    require(topk_idx.shape[0] == x.shape[0], "num_tokens == topk_idx->size(0)")
    require(topk_idx.shape[0] > 0, "no token at all: nobody ever tried")
    require(topk_idx.shape[1] <= 32, "num_topk <= 32")
    require(bool((topk_idx < num_experts).all()), "topk_idx < num_experts")
    ordered = topk_idx.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not bool(twice.any()), "an expert twice in one token's top-k")
    if topk_weights is not None:
        check_weights(topk_weights, tuple(topk_idx.shape))


def check_weights(weights: Tensor, shape: tuple[int, ...]) -> None:
    """Router weights and their gradients are float32 everywhere."""
    require(weights.is_contiguous() and tuple(weights.shape) == shape, f"topk_weights: contiguous {shape}")
    require(weights.dtype == torch.float32, f"topk_weights: expected scalar type Float but found {weights.dtype}")
    require(not bool(weights.isnan().any()), "a weight that is not a number")
