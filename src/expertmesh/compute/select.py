"""Choosing how the experts are multiplied, by name."""

from __future__ import annotations

from torch import nn

from expertmesh.compute.gate import gate_of
from expertmesh.compute.gemm import ExpertGemm, ExpertLoop, GroupedMM
from expertmesh.compute.routed import ExpertFunction
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec

COMPUTES: dict[str, type[ExpertGemm]] = {"grouped_mm": GroupedMM, "expert_loop": ExpertLoop}


def check_compute(name: str) -> None:
    """Refuse a compute that does not exist.

    Raises:
        ConfigError: names those that do.
    """
    if name not in ("auto", *COMPUTES):
        raise ConfigError(f"ep_compute {name!r} is unknown: set it to auto or one of {', '.join(COMPUTES)}.")


def build_expert_function(name: str, experts: nn.Module, spec: ExpertsSpec, gradient_scale: float) -> ExpertFunction:
    """What one experts module computes. `auto` is `expert_loop` on a CPU and `grouped_mm` elsewhere.

    Args:
        name: `auto` or one of `COMPUTES`.
        experts: the module, its weights already where they are computed.
        spec: its layout.
        gradient_scale: factor on the gradients of weights and biases.

    Raises:
        ConfigError: see `check_compute`.
    """
    check_compute(name)
    if name == "auto":
        name = "expert_loop" if experts.down_proj.device.type == "cpu" else "grouped_mm"
    return ExpertFunction(gate_of(experts, spec), COMPUTES[name](), spec.is_transposed, gradient_scale)
