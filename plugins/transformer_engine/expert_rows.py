"""What lies around the GEMMs of experts: gathering rows, filling each expert's up with zeros, gating, summing by token.

With autograd functions of our own where PyTorch's would keep more, or would add gradients up in fewer bits.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from expertmesh.compute.gate import Gate
from expertmesh.dispatch.rows import ExpertRows


class PaddedRows:
    """A plan's rows, each expert's filled up to a multiple of `alignment`.

    Attributes:
        splits: rows of each expert, with those that fill up. There is one at least: nobody has asked Transformer Engine
            for the product of nothing.
    """

    def __init__(self, rows: ExpertRows, alignment: int) -> None:
        self._rows = rows
        self._counts = _counts(rows)
        self._num_used = sum(self._counts)
        self.splits = [-(-count // alignment) * alignment for count in self._counts]
        if self._num_used == 0:
            self.splits[0] = alignment
        self._slots = self._where() if self.splits != self._counts else None

    @property
    def are_tokens(self) -> bool:
        """Whether the rows are the tokens themselves, or the first of them."""
        return self._rows.token_index is None and self._slots is None

    def gather(self, tokens: Tensor) -> Tensor:
        """`[received, width]` to `[sum of splits, width]`."""
        if self.are_tokens:
            return self._used(tokens)
        index = self._rows.token_index
        return _Gather.apply(tokens, index, self._slots, self._num_used, sum(self.splits))

    def gather_weights(self, row_weights: Tensor) -> Tensor:
        """`[rows]` to `[sum of splits, 1]`, in float32."""
        weights = self._used(row_weights).unsqueeze(1)
        if self._slots is None:
            return weights
        return weights.new_zeros(sum(self.splits), 1).index_copy(0, self._slots, weights)

    def only_real(self, results: Tensor) -> Tensor:
        """`[sum of splits, width]` without the rows that fill up."""
        return results if self._slots is None else results.index_select(0, self._slots)

    def sum_by_token(self, results: Tensor, tokens: Tensor) -> Tensor:
        """`[rows, width]`, without the rows that fill up, added up in float32 to the shape and dtype of `tokens`."""
        index = self._rows.token_index
        if index is not None:
            return _SumByToken.apply(results, index, tokens.shape[0]).to(tokens.dtype)
        return F.pad(results.to(tokens.dtype), (0, 0, 0, self._rows.num_rows - self._num_used))

    def _used(self, of_rows: Tensor) -> Tensor:
        """Without what lies behind the last expert's rows."""
        return of_rows if of_rows.shape[0] == self._num_used else of_rows[: self._num_used]

    def _where(self) -> Tensor:
        """`[rows]` int64, where each real row goes."""
        device = self._rows.offsets.device
        behind = [end - size for end, size in zip(accumulate(self.splits), self.splits, strict=True)]
        before = [end - size for end, size in zip(accumulate(self._counts), self._counts, strict=True)]
        shift, counts = torch.tensor([[b - a for a, b in zip(before, behind, strict=True)], self._counts]).to(device)
        return torch.arange(self._num_used, device=device) + shift.repeat_interleave(counts, output_size=self._num_used)


def _counts(rows: ExpertRows) -> list[int]:
    """How many rows each expert has. Where the dispatcher left it on the device, this waits for the device."""
    if rows.rows_per_expert is not None:
        return rows.rows_per_expert
    return rows.offsets.diff(prepend=rows.offsets.new_zeros(1)).tolist()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, tokens: Tensor, index: Tensor | None, slots: Tensor | None, num_used: int, num_padded: int
    ) -> Tensor:
        ctx.save_for_backward(index, slots)
        ctx.shape, ctx.num_used = tokens.shape, num_used
        rows = tokens[:num_used] if index is None else tokens.index_select(0, index)
        return rows if slots is None else tokens.new_zeros(num_padded, *tokens.shape[1:]).index_copy_(0, slots, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        index, slots = ctx.saved_tensors
        rows = grad if slots is None else grad.index_select(0, slots)
        if index is None:
            return F.pad(rows, (0, 0, 0, ctx.shape[0] - ctx.num_used)), None, None, None, None
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, rows.float()).to(grad.dtype), None, None, None, None


class _SumByToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = rows.dtype
        total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        return total.index_add_(0, index, rows.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.to(ctx.dtype).index_select(0, index), None, None


class Gated(torch.autograd.Function):
    """The activation of `[rows, up_width]`, times `[rows, 1]` weights where there are some. Keeps its input only."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Gate, projected: Tensor, weights: Tensor | None) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(projected, weights)
        activation = gate(projected)
        return activation if weights is None else (activation * weights).to(projected.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        projected, weights = ctx.saved_tensors
        activation, pull_back = ctx.gate.pullback(projected)
        if weights is None:
            return None, pull_back(grad), None
        grad_weights = (grad * activation).sum(1, keepdim=True, dtype=torch.float32)
        return None, pull_back((grad * weights).to(grad.dtype)), grad_weights


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def scaled_gradient(tensor: Tensor, scale: float) -> Tensor:
    """A tensor whose gradient is multiplied on its way back."""
    return tensor if scale == 1 else _ScaledGradient.apply(tensor, scale)
