"""Shared experts start with their block, and nobody looks at their result before it was waited for.

Streams of a CPU do nothing by themselves; here they note who waits for whom, and what was computed on a
side stream is not a number until somebody did.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from ranks.models import build
from torch import nn

from expertmesh.experts import find_experts
from expertmesh.overlap import SHARED, SharedExpertsAhead, reads_after_experts

MAIN = "main"
FAMILIES = ("qwen2_moe", "deepseek_v3", "glm4_moe", "nemotron_h")


class Streams:
    """Stands for `torch.cpu`'s streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: str | Streams.Stream = MAIN
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        streams = self

        class Stream:
            def wait_stream(self, other) -> None:
                streams.wait("side", "main" if other.name == MAIN else "side")

            name = "side"

        self.Stream = Stream

    def current_stream(self, *_):
        streams = self

        class Current:
            name = MAIN

            def wait_stream(self, other) -> None:
                streams.wait(MAIN, other.name)

        return Current()

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = "side"
        yield
        self.current = MAIN

    def wait(self, who: str, whom: str) -> None:
        self.log.append(f"{who} waits for {whom}")
        if who == MAIN:
            for tensor, numbers in self.pending:
                tensor.data.copy_(numbers)
            self.pending.clear()


def late(streams: Streams, shared: nn.Module) -> None:
    """What comes from the side stream is NaN until it is waited for."""
    compute = shared.forward

    def computed(hidden):
        result = compute(hidden)
        streams.log.append(f"shared experts on {streams.current}")
        if streams.current == "side":
            streams.pending.append((result, result.detach().clone()))
            result.data.fill_(float("nan"))
        return result

    shared.forward = computed


def blocks(family):
    """A block with shared experts, and a copy of it whose shared experts run ahead."""
    model = build(family)
    experts = find_experts(model)
    name = next(iter(experts)).rpartition(".")[0]
    plain = model.get_submodule(name)
    ahead = copy.deepcopy(plain)
    return plain, ahead


def shared_of(block):
    return next(child for name, child in block.named_children() if name in SHARED)


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    return streams


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_computes_the_same_with_its_shared_experts_ahead(family, streams):
    plain, block = blocks(family)
    shared = shared_of(block)
    late(streams, shared)
    SharedExpertsAhead(block, shared, block.experts, torch.device("cpu"))
    block.experts.register_forward_pre_hook(lambda *_: streams.log.append("experts"))
    hidden = torch.randn(2, 5, 32)
    outcomes = []
    for each in (plain, block):
        mine = hidden.clone().requires_grad_()
        output = each(mine)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        outcomes.append([output.detach(), mine.grad, *(p.grad for p in each.parameters())])
    for ours, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    assert streams.log == ["side waits for main", "shared experts on side", "experts", "main waits for side"]


def test_a_block_that_reads_too_early_is_waited_for(streams):
    class Impatient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared_expert, self.experts = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden):
            shared = self.shared_expert(hidden)
            hidden = hidden + shared
            return self.experts(hidden)

    block = Impatient()
    late(streams, block.shared_expert)
    assert not reads_after_experts(block, block.shared_expert, block.experts)
    SharedExpertsAhead(block, block.shared_expert, block.experts, torch.device("cpu"))
    assert block(torch.randn(3, 4)).isfinite().all()


def test_shared_experts_that_get_something_else_compute_it(streams):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared_expert, self.experts = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden):
            routed = self.experts(hidden)
            return routed + self.shared_expert(routed)

    block = Other()
    expected = copy.deepcopy(block)
    SharedExpertsAhead(block, block.shared_expert, block.experts, torch.device("cpu"))
    hidden = torch.randn(3, 4)
    assert torch.equal(block(hidden), expected(hidden))
