"""The experts of one rank on the tokens it received, forward and backward, in one autograd function.

For row `p` of token `t` and expert `e`: `y_p = gate(x_t W_up) W_down`, and the output is the weighted sum over the rows
of a token, `out_t = sum_p w_p y_p`, taken here in float32, so that one row a token travels back. Between forward and
backward only the up projection's output is kept; the gathered rows and the activation are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from expertmesh.compute.gate import Gate
from expertmesh.compute.gemm import Chunk, ExpertGemm
from expertmesh.dispatch.protocol import ExpertRows


@dataclass(frozen=True)
class ExpertFunction:
    """What is computed, apart from the tensors.

    Attributes:
        gate: what lies between the projections.
        gemm: how rows are multiplied.
        is_transposed: how the weights are stored, see `ExpertsSpec`.
        gradient_scale: factor on the gradients of weights and biases (not on those of tokens).
    """

    gate: Gate
    gemm: ExpertGemm
    is_transposed: bool
    gradient_scale: float


@dataclass(frozen=True)
class ExpertTensors:
    """The local parameters of one experts module; biases may be missing.

    Attributes:
        up: `[num_local_experts, up_width, hidden]`, or its transpose.
        down: `[num_local_experts, hidden, intermediate]`, or its transpose.
        up_bias: `[num_local_experts, up_width]`.
        down_bias: `[num_local_experts, hidden]`.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def routed_experts(
    function: ExpertFunction, weights: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows
) -> Tensor:
    """The weighted sum over this rank's experts for each received token.

    Args:
        function: what is computed.
        weights: this rank's experts; other dtypes than the tokens' are cast as they are used.
        tokens: `[received, hidden]`.
        row_weights: `[rows]` float32.
        rows: the plan.

    Returns:
        `[received, hidden]` in the tokens' dtype.
    """
    keep = torch.is_grad_enabled()
    tensors = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    return _RoutedExperts.apply(function, rows, keep, tokens, row_weights, *tensors)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        function: ExpertFunction,
        rows: ExpertRows,
        keep: bool,
        tokens: Tensor,
        row_weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        gemm = function.gemm
        chunks = gemm.chunks(rows)
        up_matrices, down_matrices = (gemm.matrices(_in_out(weight, function.is_transposed)) for weight in (up, down))
        token_index, weights = _by_chunk(chunks, rows.token_index, row_weights.unsqueeze(1))
        output = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        kept = []
        for i, chunk in enumerate(chunks):
            projected = gemm.multiply(tokens.index_select(0, token_index[i]), up_matrices[i], chunk)
            if up_bias is not None:
                projected += _bias_rows(up_bias, chunk, projected)
            result = gemm.multiply(function.gate(projected), down_matrices[i], chunk)
            if down_bias is not None:
                result += _bias_rows(down_bias, chunk, result)
            output.index_add_(0, token_index[i], result.float().mul_(weights[i]))
            if keep:
                kept.append(projected)
        if keep:
            ctx.function, ctx.rows, ctx.chunks = function, rows, chunks
            ctx.save_for_backward(tokens, row_weights, up, down, up_bias, down_bias, *kept)
        return output.to(tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens, row_weights, up, down, up_bias, down_bias, *kept = ctx.saved_tensors
        function, gemm = ctx.function, ctx.function.gemm
        needs = dict(zip(("up", "down", "up_bias", "down_bias"), ctx.needs_input_grad[5:], strict=True))
        up_matrices, down_matrices = (
            gemm.matrices(_in_out(weight, function.is_transposed).transpose(1, 2)) for weight in (up, down)
        )
        weights = row_weights.unsqueeze(1).to(tokens.dtype)
        token_index, weights = _by_chunk(ctx.chunks, ctx.rows.token_index, weights)
        grad_up = gemm.weight_gradient(up, function.is_transposed, function.gradient_scale)
        grad_down = gemm.weight_gradient(down, function.is_transposed, function.gradient_scale)
        grad_up_bias = torch.zeros_like(up_bias) if needs["up_bias"] else None
        grad_down_bias = torch.zeros_like(down_bias) if needs["down_bias"] else None
        grad_tokens = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        grad_row_weights = []

        for i, (chunk, projected) in enumerate(zip(ctx.chunks, kept, strict=True)):
            grad_result = grad_output.index_select(0, token_index[i])
            activation, gate_backward = function.gate.pullback(projected)

            grad_activation = gemm.multiply(grad_result, down_matrices[i], chunk)
            grad_weight = (grad_activation * activation).sum(1, dtype=torch.float32)
            if down_bias is not None:
                grad_weight += (grad_result * _bias_rows(down_bias, chunk, grad_result)).sum(1, dtype=torch.float32)
            grad_row_weights.append(grad_weight)
            if needs["down"]:
                grad_down.add(activation * weights[i], grad_result, chunk)
            if grad_down_bias is not None:
                _add_bias_gradient(grad_down_bias, grad_result * weights[i], chunk, function.gradient_scale)

            grad_projected = gate_backward(grad_activation.mul_(weights[i]))
            if needs["up"]:
                grad_up.add(tokens.index_select(0, token_index[i]), grad_projected, chunk)
            if grad_up_bias is not None:
                _add_bias_gradient(grad_up_bias, grad_projected, chunk, function.gradient_scale)
            grad_tokens.index_add_(0, token_index[i], gemm.multiply(grad_projected, up_matrices[i], chunk).float())

        return (
            None,
            None,
            None,
            grad_tokens.to(tokens.dtype),
            torch.cat(grad_row_weights),
            grad_up.result.to(up.dtype) if needs["up"] else None,
            grad_down.result.to(down.dtype) if needs["down"] else None,
            grad_up_bias,
            grad_down_bias,
        )


def _by_chunk(chunks: list[Chunk], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut tensors with one entry a row into one view a chunk."""
    sizes = [chunk.num_rows for chunk in chunks]
    return [tensor.split(sizes) for tensor in tensors]


def _in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    """A `[experts, in, out]` view of a stored weight."""
    return weight if is_transposed else weight.transpose(1, 2)


def _expert_of_row(chunk: Chunk, num_rows: int) -> Tensor:
    """`[rows]` int64, each row's expert counted from the chunk's first."""
    row = torch.arange(num_rows, device=chunk.offsets.device, dtype=torch.int32)
    return torch.searchsorted(chunk.offsets, row, right=True)


def _bias_rows(bias: Tensor, chunk: Chunk, like: Tensor) -> Tensor:
    """`[rows, width]`, each row's bias, in the dtype of `like`."""
    return bias[chunk.experts].to(like.dtype).index_select(0, _expert_of_row(chunk, like.shape[0]))


def _add_bias_gradient(total: Tensor, grad: Tensor, chunk: Chunk, scale: float) -> None:
    """Add the rows `[rows, width]` of each expert's gradient to `total[expert]`."""
    rows = grad.to(total.dtype).mul(scale)
    total[chunk.experts].index_add_(0, _expert_of_row(chunk, rows.shape[0]), rows)
