"""`Between` by the kernels, for experts that are all computed at once and gated by `silu(gate) * up`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from expertmesh.compute.between import Between, GateGradients, Total
from expertmesh.compute.triton import kernels
from expertmesh.dispatch.rows import ExpertRows, RowRange

# Elements of a row that one program computes at a time, at most.
_WIDEST = 1024
_ROWS_BLOCK = 128


class SummedRows(Total):
    """Each token collects its own rows: no atomics, no float32 total, and no copy of the rows with their weights."""

    def __init__(self, rows: ExpertRows, tokens: Tensor) -> None:
        self._total = tokens.new_empty(tokens.shape)
        self._slots = _slots(rows, tokens.shape[0])

    def add(self, part: RowRange, rows: Tensor, row_weights: Tensor | None = None) -> None:
        """See `Total.add`. All rows come at once."""
        width = rows.shape[1]
        block = _block(width)
        _launch(
            kernels.sum_of_rows,
            (self._total.shape[0], triton.cdiv(width, block)),
            rows,
            row_weights,
            self._slots,
            self._total,
            self._slots.shape[1],
            width,
            rows.stride(0),
            self._total.stride(0),
            0 if row_weights is None else row_weights.stride(0),
            HAS_WEIGHTS=row_weights is not None,
            BLOCK=block,
        )

    def result(self) -> Tensor:
        """See `Total.result`."""
        return self._total


class TritonBetween(Between):
    """See the module's docstring."""

    def activation(self, projected: Tensor) -> Tensor:
        """See `Between.activation`."""
        num_rows, width = projected.shape[0], projected.shape[1] // 2
        activation = projected.new_empty(num_rows, width)
        block = _block(width)
        grid = (num_rows, triton.cdiv(width, block))
        strides = projected.stride(0), activation.stride(0)
        _launch(kernels.gated, grid, projected, activation, width, *strides, BLOCK=block)
        return activation

    def gate_gradients(
        self, projected: Tensor, grad_activation: Tensor, row_weights: Tensor, needs_activation: bool
    ) -> GateGradients:
        """See `Between.gate_gradients`."""
        num_rows, width = grad_activation.shape
        grad_projected = projected.new_empty(projected.shape)
        grad_weights = row_weights.new_empty(num_rows)
        _launch(
            kernels.gated_backward,
            (num_rows,),
            projected,
            grad_activation,
            row_weights,
            grad_projected,
            grad_weights,
            width,
            projected.stride(0),
            grad_activation.stride(0),
            grad_projected.stride(0),
            row_weights.stride(0),
            BLOCK=_block(width),
        )
        return GateGradients(grad_projected, grad_weights, grad_activation)

    def total(self, rows: ExpertRows, tokens: Tensor) -> Total:
        """See `Between.total`."""
        return SummedRows(rows, tokens)


def _slots(rows: ExpertRows, num_tokens: int) -> Tensor:
    """`[received, num_local_experts]` int32, each token's row of each expert, -1 where it has none.

    `[received, 1]` where each row is a token.
    """
    device = rows.offsets.device
    if rows.token_index is None:
        return torch.arange(num_tokens, dtype=torch.int32, device=device).unsqueeze(1)
    num_experts = rows.offsets.shape[0]
    slots = torch.full((num_tokens, num_experts), -1, dtype=torch.int32, device=device)
    _launch(
        kernels.slots_of_rows,
        (triton.cdiv(rows.num_rows, _ROWS_BLOCK),),
        rows.token_index,
        rows.offsets,
        slots,
        rows.num_rows,
        num_experts,
        rows.token_index.stride(0),
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=_ROWS_BLOCK,
    )
    return slots


def _launch(kernel: Callable, grid: tuple[int, ...], *arguments: Tensor | int | None, **constants: int) -> None:
    # A device refuses a grid without programs.
    if all(grid):
        kernel[grid](*arguments, **constants)


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), _WIDEST)
