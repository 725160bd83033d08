"""Multiplying rows that are sorted by expert with each expert's own matrix.

Weights come as `[num_local_experts, in, out]` views of whatever the model stores; no transposed copy is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.dispatch.rows import ExpertRows


@dataclass(frozen=True)
class Chunk:
    """Experts that are computed together.

    Attributes:
        experts: their range among the local experts.
        num_rows: how many rows they have; a chunk's rows follow those of the chunk before.
        offsets: `[experts]` int32, where each one's rows end, counted from the chunk's first row.
    """

    experts: slice
    num_rows: int
    offsets: Tensor


class WeightGradient(ABC):
    """Collects the gradient of one weight, chunk after chunk, in the layout in which the model stores it.

    Args:
        weight: the stored weight, `[num_local_experts, ...]`.
        is_transposed: whether it is stored as `[..., in, out]` rather than `[..., out, in]`.
        scale: factor on the gradient.
    """

    def __init__(self, weight: Tensor, is_transposed: bool, scale: float) -> None:
        self.weight = weight
        self.is_transposed = is_transposed
        self.scale = scale
        self.result: Tensor | None = None

    @abstractmethod
    def add(self, rows_in: Tensor, grad_out: Tensor, chunk: Chunk) -> None:
        """Add `rows_in^T @ grad_out` of a chunk: `[rows, in]` and `[rows, out]`."""


class ExpertGemm(ABC):
    """One way of multiplying rows with experts' matrices.

    Attributes:
        weight_gradient: how it collects gradients.
        needs_counts_on_host: whether it reads `ExpertRows.rows_per_expert`.
    """

    weight_gradient: type[WeightGradient]
    needs_counts_on_host: bool

    @abstractmethod
    def alignment(self, dtype: torch.dtype) -> int:
        """Elements of `dtype` that every matrix dimension has to be a multiple of."""

    @abstractmethod
    def chunks(self, rows: ExpertRows) -> list[Chunk]:
        """How the rows are cut. Every expert is in exactly one chunk, also one without rows."""

    @abstractmethod
    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """The matrices of each chunk, out of `[num_local_experts, in, out]`."""

    @abstractmethod
    def multiply(self, rows: Tensor, matrices: Tensor, chunk: Chunk) -> Tensor:
        """`[rows, in]` by a chunk's matrices to `[rows, out]`, in the dtype of the rows."""


class _LoopGradient(WeightGradient):
    """Written by the GEMM straight into place, scale included."""

    def add(self, rows_in: Tensor, grad_out: Tensor, chunk: Chunk) -> None:
        if self.result is None:
            self.result = torch.empty(self.weight.shape, dtype=rows_in.dtype, device=rows_in.device)
        target = self.result[chunk.experts.start]
        left, right = (rows_in, grad_out) if self.is_transposed else (grad_out, rows_in)
        torch.addmm(target, left.t(), right, beta=0, alpha=self.scale, out=target)


class ExpertLoop(ExpertGemm):
    """One expert at a time. On a CPU its rows stay in the cache from one projection to the next."""

    weight_gradient = _LoopGradient
    needs_counts_on_host = True

    def alignment(self, dtype: torch.dtype) -> int:
        """Any size will do."""
        return 1

    def chunks(self, rows: ExpertRows) -> list[Chunk]:
        """One chunk an expert."""
        counts = rows.rows_per_expert
        offsets = torch.tensor(counts, dtype=torch.int32, device=rows.offsets.device).split(1)
        return [Chunk(slice(i, i + 1), count, offsets[i]) for i, count in enumerate(counts)]

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """One `[in, out]` an expert."""
        return weight.unbind(0)

    def multiply(self, rows: Tensor, matrices: Tensor, chunk: Chunk) -> Tensor:
        """See `ExpertGemm.multiply`."""
        return torch.mm(rows, matrices.to(rows.dtype))


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    # PyTorch 2.13 multiplies other dtypes too, but says for fake tensors, and so for compilers, that it does not.
    if left.dtype == torch.bfloat16:
        return F.grouped_mm(left, right, offs=offsets)
    return _other_grouped_mm(left, right, offsets)


@torch.library.custom_op("expertmesh::grouped_mm", mutates_args=())
def _other_grouped_mm(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(left, right, offs=offsets)


@_other_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    groups = (offsets.shape[0],) if right.ndim == 2 else ()
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


class _GroupedGradient(WeightGradient):
    """One kernel for all experts."""

    def add(self, rows_in: Tensor, grad_out: Tensor, chunk: Chunk) -> None:
        left, right = (rows_in, grad_out) if self.is_transposed else (grad_out, rows_in)
        gradient = _grouped_mm(left.t(), right, chunk.offsets)
        self.result = gradient if self.scale == 1 else gradient.mul_(self.scale)


class GroupedMM(ExpertGemm):
    """All experts in one `torch.nn.functional.grouped_mm`. Strides must be multiples of 16 bytes; no float64."""

    weight_gradient = _GroupedGradient
    needs_counts_on_host = False

    def alignment(self, dtype: torch.dtype) -> int:
        """Strides of 16 bytes."""
        return 16 // dtype.itemsize

    def chunks(self, rows: ExpertRows) -> list[Chunk]:
        """A single chunk."""
        return [Chunk(slice(0, rows.offsets.shape[0]), rows.num_rows, rows.offsets)]

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """All of them, `[num_local_experts, in, out]`."""
        return (weight,)

    def multiply(self, rows: Tensor, matrices: Tensor, chunk: Chunk) -> Tensor:
        """See `ExpertGemm.multiply`."""
        return _grouped_mm(rows, matrices.to(rows.dtype), chunk.offsets)
