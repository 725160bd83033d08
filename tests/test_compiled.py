"""`torch.compile` of blocks, as Accelerate switches it on: the same numbers, and cut only where tokens travel."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from processes import TESTS, run_ranks
from ranks.models import build

from expertmesh.compute.routed import ExpertTensors
from expertmesh.compute.select import COMPUTES
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.experts import ExpertsSpec, find_experts

# Shared experts, and a gate of the model's own.
CASES = ("qwen2_moe:loop", "gpt_oss:grouped_mm")


@cache
def results():
    program = TESTS / "ranks" / "compiled.py"
    rank_0, _ = run_ranks(program, 2, *CASES, timeout=400, env={"ACCELERATE_USE_CPU": "true"})
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_are_cut_only_at_the_dispatcher_and_compute_the_same(case):
    found = results()[case]
    assert found["compared"] > 10
    assert found["loss"] < 1e-6 and found["gradient"] < 5e-6
    assert "by_gemm.py:__call__" in found["compiled"], "the experts' arithmetic is compiled too"
    assert found["breaks"], "tokens do travel"
    assert all("reason: tokens travel between ranks" in reason for reason in found["breaks"]), found["breaks"]


def test_inductor_computes_the_same_for_any_number_of_rows():
    (experts, *_) = find_experts(build("qwen3_moe")).values()
    spec = ExpertsSpec.of(experts)
    compute = COMPUTES.find("grouped_mm")(experts, spec, 1.0)

    def run(called, tokens: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, 32, generator=generator, requires_grad=True)
        index = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :2]
        weights = torch.rand(tokens, 2, generator=generator, requires_grad=True)
        dispatched = LocalDispatcher(8).dispatch(hidden, index, weights)
        tensors = ExpertTensors.of(*(getattr(experts, parameter) for parameter in spec.parameter_names))
        experts.zero_grad()
        output = called(tensors, dispatched.tokens, dispatched.row_weights, dispatched.rows)
        output.square().sum().backward()
        return [output.detach(), hidden.grad, weights.grad, *(p.grad for p in experts.parameters())]

    torch._dynamo.reset()
    compiled = torch.compile(compute, fullgraph=True)
    for tokens in (40, 61, 50):
        for found, expected in zip(run(compiled, tokens), run(compute, tokens), strict=True):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
