"""The experts of one rank on the tokens it received, forward and backward, in one autograd function.

For row `p` of token `t` and expert `e`: `y_p = gate(x_t W_up) W_down`, and the output is the weighted sum over the rows
of a token, `out_t = sum_p w_p y_p`, taken here in float32, so that one row a token travels back. Between forward and
backward only the up projection's output is kept; the gathered rows and the activation are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from expertmesh.compute.between import Between
from expertmesh.compute.gemm import Chunk, ExpertGemm
from expertmesh.compute.projection import LowRank, Projection, ProjectionBackward, ProjectionTensors
from expertmesh.dispatch.rows import ExpertRows, RowRange

# Arguments of the autograd function before the first parameter, and parameters of one projection.
_FIRST_LEAF = 6
_LEAVES = 4


@dataclass(frozen=True)
class ExpertFunction:
    """What is computed, apart from the tensors.

    Attributes:
        between: what is done to rows between the GEMMs.
        gemm: how rows are multiplied.
        is_transposed: how the weights are stored, see `ExpertsSpec`.
        gradient_scale: factor on the gradients of weights and biases (not on those of tokens).
    """

    between: Between
    gemm: ExpertGemm
    is_transposed: bool
    gradient_scale: float


@dataclass(frozen=True)
class ExpertTensors:
    """The local parameters of one experts module.

    Attributes:
        up: the projection from hidden features.
        down: the projection back to them.
    """

    up: ProjectionTensors
    down: ProjectionTensors

    @classmethod
    def of(
        cls, up: Tensor, down: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> ExpertTensors:
        """From parameters in the order of `ExpertsSpec.parameter_names`, without adapters."""
        return cls(ProjectionTensors(up, up_bias), ProjectionTensors(down, down_bias))


def routed_experts(
    function: ExpertFunction, experts: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows
) -> Tensor:
    """The weighted sum over this rank's experts for each received token.

    Args:
        function: what is computed.
        experts: this rank's experts; other dtypes than the tokens' are cast as they are used.
        tokens: `[received, hidden]`.
        row_weights: `[rows]` float32.
        rows: the plan.

    Returns:
        `[received, hidden]` in the tokens' dtype.
    """
    keep = torch.is_grad_enabled()
    leaves = (*experts.up.leaves, *experts.down.leaves)
    return _RoutedExperts.apply(function, experts, rows, keep, tokens, row_weights, *leaves)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        function: ExpertFunction,
        experts: ExpertTensors,
        rows: ExpertRows,
        keep: bool,
        tokens: Tensor,
        row_weights: Tensor,
        *leaves: Tensor | None,
    ) -> Tensor:
        gemm = function.gemm
        chunks = gemm.chunks(rows)
        up, down = (
            Projection(gemm, tensors, function.is_transposed, tokens.dtype) for tensors in (experts.up, experts.down)
        )
        ranges, weights = _by_chunk(chunks, rows, row_weights.unsqueeze(1))
        output = function.between.total(rows, tokens)
        kept = []
        for i, chunk in enumerate(chunks):
            projected = up(ranges[i].gather(tokens), i, chunk)
            result = down(function.between.activation(projected), i, chunk)
            output.add(ranges[i], result, weights[i])
            if keep:
                kept.append(projected)
        if keep:
            scalings = tuple(tensors.adapter and tensors.adapter.scaling for tensors in (experts.up, experts.down))
            ctx.function, ctx.scalings, ctx.rows, ctx.chunks = function, scalings, rows, chunks
            ctx.save_for_backward(tokens, row_weights, *leaves, *kept)
        return output.result()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens, row_weights, *saved = ctx.saved_tensors
        function, kept = ctx.function, saved[2 * _LEAVES :]
        up, down = (
            ProjectionBackward(
                function.gemm,
                _tensors(saved[start : start + _LEAVES], scaling),
                function.is_transposed,
                tokens.dtype,
                ctx.needs_input_grad[_FIRST_LEAF + start : _FIRST_LEAF + start + _LEAVES],
                function.gradient_scale,
            )
            for start, scaling in zip((0, _LEAVES), ctx.scalings, strict=True)
        )
        ranges, weights = _by_chunk(ctx.chunks, ctx.rows, row_weights.unsqueeze(1))
        grad_tokens = function.between.total(ctx.rows, tokens)
        grad_row_weights = []

        for i, (chunk, projected) in enumerate(zip(ctx.chunks, kept, strict=True)):
            grad_result = ranges[i].gather(grad_output)
            grad_activation = down.rows(grad_result, i, chunk)
            gate = function.between.gate_gradients(projected, grad_activation, weights[i], down.needs_parameters)
            bias_share = down.bias_share(grad_result, chunk)
            grad_row_weights.append(gate.row_weights if bias_share is None else gate.row_weights + bias_share)
            if down.needs_parameters:
                down.parameters(gate.weighted_activation, grad_result, i, chunk, weights[i])
            if up.needs_parameters:
                up.parameters(ranges[i].gather(tokens), gate.projected, i, chunk)
            grad_tokens.add(ranges[i], up.rows(gate.projected, i, chunk))

        return (
            None,
            None,
            None,
            None,
            grad_tokens.result(),
            _filled_up(grad_row_weights, ctx.rows.num_rows),
            *up.gradients,
            *down.gradients,
        )


def _tensors(leaves: Sequence[Tensor | None], scaling: float | None) -> ProjectionTensors:
    weight, bias, a, b = leaves
    return ProjectionTensors(weight, bias, None if scaling is None else LowRank(a, b, scaling))


def _by_chunk(chunks: list[Chunk], rows: ExpertRows, row_weights: Tensor) -> tuple[list[RowRange], tuple[Tensor, ...]]:
    """The rows and their weights `[rows, 1]`, cut into one view a chunk."""
    sizes = [chunk.num_rows for chunk in chunks]
    return rows.split(sizes), row_weights[: sum(sizes)].split(sizes)


def _filled_up(of_chunks: list[Tensor], num_rows: int) -> Tensor:
    """`[num_rows]`, filled up for rows that belong to no expert."""
    of_rows = of_chunks[0] if len(of_chunks) == 1 else torch.cat(of_chunks)
    missing = num_rows - of_rows.shape[0]
    return F.pad(of_rows, (0, missing)) if missing else of_rows
