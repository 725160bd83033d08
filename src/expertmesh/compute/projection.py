"""One linear map of every expert, applied to rows that are sorted by expert, forward and backward.

For row `x` of expert `e`: `y = x W_e + b_e + s (x A_e) B_e`, with a bias and a low-rank adapter (LoRA) where there are
any. The adapter is two thin GEMMs beside the base's; the sum `W_e + s A_e B_e` is never built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.compute.gemm import Chunk, ExpertGemm, WeightGradient


@dataclass(frozen=True)
class LowRank:
    """A low-rank adapter of each local expert.

    Attributes:
        a: `[num_local_experts, rank, in]`.
        b: `[num_local_experts, out, rank]`.
        scaling: factor on the product.
    """

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class ProjectionTensors:
    """The local parameters of one projection; all but the weight may be missing.

    Attributes:
        weight: `[num_local_experts, out, in]`, or its transpose.
        bias: `[num_local_experts, out]`.
        adapter: added to the weight.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapter: LowRank | None = None

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that may need gradients: weight, bias, and the adapter's two."""
        adapter = (self.adapter.a, self.adapter.b) if self.adapter is not None else (None, None)
        return (self.weight, self.bias, *adapter)


class Projection:
    """`ProjectionTensors` at work on one set of rows.

    Args:
        gemm: how rows are multiplied.
        tensors: this rank's parameters; other dtypes than the rows' are cast as they are used.
        is_transposed: the weight is stored as `[experts, in, out]`.
        dtype: of the rows.
    """

    def __init__(self, gemm: ExpertGemm, tensors: ProjectionTensors, is_transposed: bool, dtype: torch.dtype) -> None:
        self._gemm = gemm
        self._tensors = tensors
        self._is_transposed = is_transposed
        self._in_out = gemm.matrices(_in_out(tensors.weight, is_transposed))
        self._scaling = 0.0
        if tensors.adapter is not None:
            self._scaling = tensors.adapter.scaling
            self._a, self._b = _padded(tensors.adapter, gemm.alignment(dtype))
            self._a_in_out, self._b_in_out = (gemm.matrices(_in_out(t, False)) for t in (self._a, self._b))

    def __call__(self, rows: Tensor, index: int, chunk: Chunk) -> Tensor:
        """`[rows, in]` of the `index`-th chunk to `[rows, out]`."""
        result = self._gemm.multiply(rows, self._in_out[index], chunk)
        if self._tensors.bias is not None:
            result += _bias_rows(self._tensors.bias, chunk, result)
        if self._tensors.adapter is not None:
            thin = self._gemm.multiply(rows, self._a_in_out[index], chunk)
            result.add_(self._gemm.multiply(thin, self._b_in_out[index], chunk), alpha=self._scaling)
        return result


class ProjectionBackward:
    """The derivatives of a `Projection`, chunk after chunk.

    Args:
        gemm, tensors, is_transposed, dtype: the projection's.
        needs: which of `tensors.leaves` need a gradient.
        scale: factor on the gradients of parameters (not on those of rows).
    """

    def __init__(
        self,
        gemm: ExpertGemm,
        tensors: ProjectionTensors,
        is_transposed: bool,
        dtype: torch.dtype,
        needs: Sequence[bool],
        scale: float,
    ) -> None:
        self._gemm = gemm
        self._tensors = tensors
        self._scale = scale
        self._out_in = gemm.matrices(_in_out(tensors.weight, is_transposed).transpose(1, 2))
        needs_weight, needs_bias, needs_a, needs_b = needs
        self._weight = _gradient(gemm, tensors.weight, is_transposed, scale) if needs_weight else None
        self._bias = torch.zeros_like(tensors.bias) if needs_bias else None
        self._a = self._b = None
        if tensors.adapter is not None:
            self._scaling = tensors.adapter.scaling
            a, b = _padded(tensors.adapter, gemm.alignment(dtype))
            self._a_in_out = gemm.matrices(_in_out(a, False))
            self._a_out_in, self._b_out_in = gemm.matrices(a), gemm.matrices(b)
            self._a = _gradient(gemm, a, False, scale * self._scaling) if needs_a else None
            self._b = _gradient(gemm, b, False, scale * self._scaling) if needs_b else None

    def rows(self, grad: Tensor, index: int, chunk: Chunk) -> Tensor:
        """The gradient `[rows, in]` for that of the output, `[rows, out]`."""
        result = self._gemm.multiply(grad, self._out_in[index], chunk)
        if self._tensors.adapter is not None:
            thin = self._gemm.multiply(grad, self._b_out_in[index], chunk)
            result.add_(self._gemm.multiply(thin, self._a_out_in[index], chunk), alpha=self._scaling)
        return result

    def bias_share(self, grad: Tensor, chunk: Chunk) -> Tensor | None:
        """`[rows]` float32, each row's product of the bias and the output's gradient; None without a bias."""
        if self._tensors.bias is None:
            return None
        return (grad * _bias_rows(self._tensors.bias, chunk, grad)).sum(1, dtype=torch.float32)

    @property
    def needs_parameters(self) -> bool:
        """Whether any parameter needs a gradient."""
        return any(gradient is not None for gradient in (self._weight, self._bias, self._a, self._b))

    def parameters(
        self, rows: Tensor, grad: Tensor, index: int, chunk: Chunk, row_weights: Tensor | None = None
    ) -> None:
        """Add up the parameters' gradients.

        Args:
            rows: the inputs `[rows, in]`, times `row_weights`.
            grad: the output's gradient `[rows, out]`, without them.
            index, chunk: which rows these are.
            row_weights: `[rows, 1]` float32, by default ones.
        """
        if self._weight is not None:
            self._weight.add(rows, grad, chunk)
        if self._bias is not None:
            weighted = grad if row_weights is None else grad * row_weights.to(grad.dtype)
            _add_bias_gradient(self._bias, weighted, chunk, self._scale)
        if self._b is not None:
            self._b.add(self._gemm.multiply(rows, self._a_in_out[index], chunk), grad, chunk)
        if self._a is not None:
            self._a.add(rows, self._gemm.multiply(grad, self._b_out_in[index], chunk), chunk)

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of `tensors.leaves`, None for those that need none."""
        weight = None if self._weight is None else self._weight.result.to(self._tensors.weight.dtype)
        adapter: tuple[Tensor | None, ...] = (None, None)
        if self._tensors.adapter is not None:
            rank = self._tensors.adapter.a.shape[1]
            adapter = (
                None if self._a is None else self._a.result[:, :rank].to(self._tensors.adapter.a.dtype),
                None if self._b is None else self._b.result[..., :rank].to(self._tensors.adapter.b.dtype),
            )
        return (weight, self._bias, *adapter)


def _gradient(gemm: ExpertGemm, weight: Tensor, is_transposed: bool, scale: float) -> WeightGradient:
    return gemm.weight_gradient(weight, is_transposed, scale)


def _padded(adapter: LowRank, multiple: int) -> tuple[Tensor, Tensor]:
    """The adapter's matrices with zeros up to a rank that the GEMM takes."""
    missing = -adapter.a.shape[1] % multiple
    if not missing:
        return adapter.a, adapter.b
    return F.pad(adapter.a, (0, 0, 0, missing)), F.pad(adapter.b, (0, missing))


def _in_out(weight: Tensor, is_transposed: bool) -> Tensor:
    """A `[experts, in, out]` view of a stored weight."""
    return weight if is_transposed else weight.transpose(1, 2)


def _expert_of_row(chunk: Chunk, num_rows: int) -> Tensor:
    """`[rows]` int64, each row's expert counted from the chunk's first; one past the last where it has none."""
    row = torch.arange(num_rows, device=chunk.offsets.device, dtype=torch.int32)
    return torch.searchsorted(chunk.offsets, row, right=True)


def _bias_rows(bias: Tensor, chunk: Chunk, like: Tensor) -> Tensor:
    """`[rows, width]`, each row's bias, in the dtype of `like`."""
    biases = F.pad(bias[chunk.experts].to(like.dtype), (0, 0, 0, 1))
    return biases.index_select(0, _expert_of_row(chunk, like.shape[0]))


def _add_bias_gradient(total: Tensor, grad: Tensor, chunk: Chunk, scale: float) -> None:
    """Add the rows `[rows, width]` of each expert's gradient to `total[expert]`."""
    experts = total[chunk.experts]
    with_nobody = total.new_zeros(experts.shape[0] + 1, experts.shape[1])
    with_nobody.index_add_(0, _expert_of_row(chunk, grad.shape[0]), grad.to(total.dtype))
    experts.add_(with_nobody[:-1], alpha=scale)
