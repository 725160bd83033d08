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


def choose_compute(name: str, device_type: str, counts_on_host: bool) -> str:
    """What `ep_compute` means: `auto` is `expert_loop` on a CPU and `grouped_mm` elsewhere, and where counts stay on
    the device.

    Args:
        name: `auto` or one of `COMPUTES`.
        device_type: where the experts are computed.
        counts_on_host: whether the dispatcher tells the host how many rows each expert has.

    Raises:
        ConfigError: an unknown name, or a compute that cannot do without those counts.
    """
    check_compute(name)
    if name == "auto":
        return "expert_loop" if device_type == "cpu" and counts_on_host else "grouped_mm"
    if COMPUTES[name].needs_counts_on_host and not counts_on_host:
        fitting = [other for other, compute in COMPUTES.items() if not compute.needs_counts_on_host]
        raise ConfigError(
            f"ep_compute {name} must know on the host how many rows each expert has, and the ep_dispatcher leaves that "
            f"on the device: set ep_compute to auto or {', '.join(fitting)}, or choose another dispatcher."
        )
    return name


def build_expert_function(name: str, experts: nn.Module, spec: ExpertsSpec, gradient_scale: float) -> ExpertFunction:
    """What one experts module computes.

    Args:
        name: one of `COMPUTES`.
        experts: the module, its weights already where they are computed.
        spec: its layout.
        gradient_scale: factor on the gradients of weights and biases.
    """
    return ExpertFunction(gate_of(experts, spec), COMPUTES[name](), spec.is_transposed, gradient_scale)
