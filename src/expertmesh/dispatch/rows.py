"""The plan of a rank's computation: which arrived token goes through which local expert.

For shapes see the legend in `protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowRange:
    """Some of the rows.

    Attributes:
        tokens: where their tokens are, `[rows]` int64, or a range of the tokens where each is a row.
    """

    tokens: Tensor | slice

    def gather(self, tokens: Tensor) -> Tensor:
        """The token of each row, `[rows, width]` out of `[received, width]`."""
        return tokens[self.tokens] if isinstance(self.tokens, slice) else tokens.index_select(0, self.tokens)

    def add_to(self, total: Tensor, rows: Tensor) -> None:
        """Add `[rows, width]` up by token, to a total that `ExpertRows.new_total` made."""
        if isinstance(self.tokens, slice):
            total[self.tokens] = rows
        else:
            total.index_add_(0, self.tokens, rows.float())


@dataclass(frozen=True)
class ExpertRows:
    """Which arrived token goes through which local expert. Rows are sorted by expert; nobody sorts again.

    Attributes:
        token_index: `[rows]` int64, the received token of each row; None where rows arrived, each for itself.
        rows_per_expert: `num_local_experts` counts on the host; None where they were not read back.
        offsets: `[num_local_experts]` int32 on the device, where each expert's rows end. Rows behind the last may hold
            anything, NaN included, and nobody takes what is computed of them.
        num_rows: `P`.
    """

    token_index: Tensor | None
    rows_per_expert: list[int] | None
    offsets: Tensor
    num_rows: int

    def split(self, sizes: list[int]) -> list[RowRange]:
        """Consecutive ranges of rows."""
        if self.token_index is not None:
            return [RowRange(index) for index in self.token_index.split(sizes)]
        ends = list(accumulate(sizes))
        return [RowRange(slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]

    def new_total(self, tokens: Tensor) -> Tensor:
        """`[received, width]` for `RowRange.add_to`: zeros in float32 where several rows add up to one token."""
        if self.token_index is None:
            return tokens.new_empty(tokens.shape)
        return torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)

    def belongs_to_expert(self) -> Tensor:
        """`[rows, 1]` bool, false for the rows behind the last expert's."""
        return (torch.arange(self.num_rows, device=self.offsets.device) < self.offsets[-1]).unsqueeze(1)


# The weight of an expert that a token did not pick. A weight can be zero.
NOT_PICKED = float("-inf")


def weights_by_expert(expert_ids: Tensor, top_k_weights: Tensor, num_columns: int) -> Tensor:
    """Each token's weight of each expert, `NOT_PICKED` where it has none; differentiable.

    A token that picks one expert twice gets the sum of both weights, which is the same function.

    Args:
        expert_ids: `[tokens, top_k]` int64.
        top_k_weights: `[tokens, top_k]` float32.
        num_columns: one more than the largest id: the number of experts, or another one where an id marks slots that do
            not count.

    Returns:
        `[tokens, num_columns]` float32.
    """
    return _WeightsByExpert.apply(expert_ids, top_k_weights, num_columns)


def local_rows(weights: Tensor, counts: Tensor, rows_per_expert: list[int]) -> tuple[ExpertRows, Tensor]:
    """Lay out the rows of this rank's experts without a sort and without a read-back.

    Args:
        weights: `[received, num_local_experts]` float32 as of `weights_by_expert`, perhaps with columns behind them
            that do not count; differentiable.
        counts: `[num_local_experts]` int64, rows of each expert, on the device.
        rows_per_expert: the same counts on the host.

    Returns:
        The rows, and their weights `[rows]` float32.
    """
    picked = weights[:, : counts.shape[0]].ne(NOT_PICKED)
    expert_index, token_index = torch.nonzero_static(picked.t(), size=sum(rows_per_expert)).unbind(1)
    rows = ExpertRows(token_index, rows_per_expert, counts.cumsum(0, dtype=torch.int32), token_index.shape[0])
    return rows, _RowWeights.apply(weights, token_index, expert_index)


class _WeightsByExpert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, expert_ids: Tensor, top_k_weights: Tensor, num_columns: int
    ) -> Tensor:
        ctx.save_for_backward(expert_ids)
        weights = top_k_weights.new_full((expert_ids.shape[0], num_columns), NOT_PICKED)
        return weights.scatter_reduce_(1, expert_ids, top_k_weights, "sum", include_self=False)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[None, Tensor, None]:
        (expert_ids,) = ctx.saved_tensors
        return None, grad.gather(1, expert_ids), None


class _RowWeights(torch.autograd.Function):
    """Weights by expert to `[rows]` and their gradients back, without an accumulating scatter."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, weights: Tensor, token_index: Tensor, expert_index: Tensor
    ) -> Tensor:
        ctx.save_for_backward(token_index, expert_index)
        ctx.shape = weights.shape
        return weights[token_index, expert_index]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        # What does not count stays zero.
        return grad.new_zeros(ctx.shape).index_put_(ctx.saved_tensors, grad), None, None
