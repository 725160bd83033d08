"""`ep_compute: te` on Transformer Engine's own Python: its module and autograd function, with GEMMs of PyTorch beneath.

Prints the relative errors of the output and of all gradients to those of `loop`, for experts with and without biases
and adapters. Run with the folder of the wheel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from ranks.models import build
from torch import Tensor

from expertmesh.compute.by_gemm import Loop
from expertmesh.compute.projection import LowRank, ProjectionTensors
from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.routed import ExpertTensors
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.experts import ExpertsSpec, find_experts
from te_fidelity.gemm import on_the_cpu

TOKENS, TOP_K, RANK = 40, 3, 4


def outcome(kind: type[ExpertCompute], with_bias: bool, with_adapters: bool) -> list[Tensor]:
    """The output and the gradients of everything."""
    torch.manual_seed(0)
    experts = next(iter(find_experts(build("qwen3_moe")).values()))
    spec = replace(ExpertsSpec.of(experts), has_bias=with_bias)
    hidden, weights = torch.randn(TOKENS, 32, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    # Most experts get no row.
    index = torch.rand(TOKENS, 8).argsort(1)[:, :TOP_K] % 3
    projections = {}
    for name, weight in (("up", experts.gate_up_proj), ("down", experts.down_proj)):
        num_experts, out, width = weight.shape
        bias = torch.randn(num_experts, out, requires_grad=True) if with_bias else None
        a, b = (torch.randn(num_experts, *shape).mul_(0.2).requires_grad_() for shape in ((RANK, width), (out, RANK)))
        projections[name] = ProjectionTensors(weight, bias, LowRank(a, b, 1.5) if with_adapters else None)
    tensors = ExpertTensors(**projections)
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    output = kind(experts, spec, 0.5)(tensors, dispatched.tokens, dispatched.row_weights, dispatched.rows)
    leaves = [leaf for leaf in (*tensors.up.leaves, *tensors.down.leaves) if leaf is not None]
    mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    return [output.detach(), *torch.autograd.grad(mixed, [hidden, weights, *leaves])]


def main(folder: str) -> None:
    kinds = [(False, False), (True, False), (False, True), (True, True)]
    expected = [outcome(Loop, *kind) for kind in kinds]
    on_the_cpu(Path(folder))
    from expertmesh_plugins.transformer_engine.experts import TransformerEngineExperts

    found = [outcome(TransformerEngineExperts, *kind) for kind in kinds]
    errors = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours_of_kind, theirs_of_kind in zip(found, expected, strict=True)
        for ours, theirs in zip(ours_of_kind, theirs_of_kind, strict=True)
    ]
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
