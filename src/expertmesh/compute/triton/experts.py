"""Experts computed by `routed.py` with PyTorch's grouped GEMM, and kernels of ours for everything between."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import nn

from expertmesh.compute.between import Between
from expertmesh.compute.by_gemm import Grouped
from expertmesh.compute.gate import SiluGate, gate_of
from expertmesh.experts import ExpertsSpec


class TritonExperts(Grouped):
    """See the module's docstring."""

    @classmethod
    def refusal(cls, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertCompute.refusal`."""
        if find_spec("triton") is None:
            return "Triton is not installed: set ep_compute to auto, or install triton 3.7 (PyTorch's for CUDA has it)."
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"Triton's kernels run on CUDA, and the experts are on {device.type}: set ep_compute to auto."
        if not isinstance(gate_of(experts, spec), SiluGate):
            return (
                f"its kernels know silu(gate) * up on one block after the other, and {type(experts).__name__} computes "
                f"something else between its projections: set ep_compute to grouped_mm."
            )
        return super().refusal(experts, spec, dtype, device)

    @classmethod
    def between(cls, experts: nn.Module, spec: ExpertsSpec) -> Between:
        """The kernels."""
        # Triton is only there where this compute can be used.
        from expertmesh.compute.triton.between import TritonBetween

        return TritonBetween()
