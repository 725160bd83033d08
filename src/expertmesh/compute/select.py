"""Choosing what computes the experts, by name."""

from __future__ import annotations

import torch
from torch import nn

from expertmesh.compute.by_gemm import Grouped, Loop
from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.triton import TritonExperts
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec
from expertmesh.extensions import Extensions

COMPUTES: Extensions[ExpertCompute] = Extensions(
    "ep_compute", "expertmesh.computes", {"grouped_mm": Grouped, "loop": Loop, "triton": TritonExperts}
)


def check_compute(name: str) -> None:
    """Refuse a compute that does not exist.

    Raises:
        ConfigError: names those that do.
    """
    COMPUTES.check(name)


def choose_compute(
    name: str, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, counts_on_host: bool
) -> type[ExpertCompute]:
    """What `ep_compute` means for one experts module.

    `auto` is `loop` on a CPU whose host knows the counts, and `grouped_mm` elsewhere where it can. Our kernels have to
    be asked for until they have been seen on a GPU.

    Args:
        name: `auto`, or one of `COMPUTES`.
        experts, spec, dtype, device: see `ExpertCompute.refusal`.
        counts_on_host: whether the dispatcher tells the host how many rows each expert has.

    Raises:
        ConfigError: an unknown name, or a compute that cannot do this; it is never replaced by another.
    """
    if name == "auto":
        return _automatic(experts, spec, dtype, device, counts_on_host)
    compute = COMPUTES.find(name)
    reason = _refusal(compute, experts, spec, dtype, device, counts_on_host)
    if reason is not None:
        raise ConfigError(f"ep_compute {name} cannot be used here: {reason}")
    return compute


def _automatic(
    experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, counts_on_host: bool
) -> type[ExpertCompute]:
    best_first = (Loop, Grouped) if device.type == "cpu" else (Grouped, Loop)
    reasons = []
    for compute in best_first:
        reason = _refusal(compute, experts, spec, dtype, device, counts_on_host)
        if reason is None:
            return compute
        reasons.append(reason)
    raise ConfigError(f"nothing computes the experts of this model here: {' '.join(reasons)}")


def _refusal(
    compute: type[ExpertCompute],
    experts: nn.Module,
    spec: ExpertsSpec,
    dtype: torch.dtype,
    device: torch.device,
    counts_on_host: bool,
) -> str | None:
    if compute.needs_counts_on_host and not counts_on_host:
        return (
            "it must know on the host how many rows each expert has, and the ep_dispatcher leaves that on the device: "
            "set ep_compute to auto or grouped_mm, or choose another dispatcher."
        )
    return compute.refusal(experts, spec, dtype, device)
