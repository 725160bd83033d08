"""Experts computed by `routed.py`, with one or the other way of multiplying."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from expertmesh.compute.between import Between, PlainBetween
from expertmesh.compute.gate import gate_of
from expertmesh.compute.gemm import ExpertGemm, ExpertLoop, GroupedMM
from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.routed import ExpertFunction, ExpertTensors, routed_experts
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.experts import ExpertsSpec


class ByGemm(ExpertCompute):
    """See the module's docstring.

    Attributes:
        gemm: how rows are multiplied.
    """

    gemm: ClassVar[type[ExpertGemm]]

    def __init__(self, experts: nn.Module, spec: ExpertsSpec, gradient_scale: float) -> None:
        self.function = ExpertFunction(self.between(experts, spec), self.gemm(), spec.is_transposed, gradient_scale)

    @classmethod
    def between(cls, experts: nn.Module, spec: ExpertsSpec) -> Between:
        """What is done to rows between the GEMMs."""
        return PlainBetween(gate_of(experts, spec))

    def __call__(self, tensors: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows) -> Tensor:
        """See `ExpertCompute`."""
        return routed_experts(self.function, tensors, tokens, row_weights, rows)


class Loop(ByGemm):
    """One expert at a time."""

    gemm = ExpertLoop
    needs_counts_on_host = True

    @classmethod
    def refusal(cls, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertCompute.refusal`."""
        return None


class Grouped(ByGemm):
    """All experts in one `torch.nn.functional.grouped_mm`."""

    gemm = GroupedMM
    needs_counts_on_host = False

    @classmethod
    def refusal(cls, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertCompute.refusal`."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"torch.nn.functional.grouped_mm does not compute in {dtype}: set ep_compute to loop."
        multiple = cls.gemm().alignment(dtype)
        shapes = [tuple(getattr(experts, name).shape) for name in spec.parameter_names]
        if any(width % multiple for shape in shapes if len(shape) == 3 for width in shape[1:]):
            return (
                f"torch.nn.functional.grouped_mm takes matrices whose sides are multiples of {multiple} in {dtype}; "
                f"those of {type(experts).__name__} are {shapes}: set ep_compute to loop."
            )
        return None
