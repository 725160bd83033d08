"""What engines that bring rows have to do besides `engine_checks.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from engine_checks import CALLS, UNEVEN, Engine, check
from engine_reference import Scenario, expected, factors, inputs
from host_reads import host_reads
from torch import Tensor

from expertmesh.dispatch.transport import Route, Transport
from expertmesh.dispatch.transported import TransportDispatcher

HIDDEN = 128


@dataclass(frozen=True)
class RowsEngine(Engine):
    """An engine that brings rows: it is also looked at where they lie."""

    hidden: int = HIDDEN

    def check(self, scenario: Scenario = UNEVEN, repeat: int = 2) -> None:
        """The numbers of one call, and where rows lie."""
        super().check(scenario, repeat)
        lands(self.build(scenario), scenario)


def weighted_again(original: Callable) -> Callable:
    return lambda self, route, rows, weights: original(self, route, rows * route.handle.weights.unsqueeze(1), weights)


def lands(transport: Transport, scenario: Scenario) -> None:
    """Each expert's rows are its tokens, then zeros; along a route they arrive as they did at first."""
    rank = dist.get_rank()
    tokens, *routing = inputs(scenario, rank, HIDDEN)
    route = transport.plan(tokens, *routing)
    rows, weights = arrived(transport, route, tokens, tuple(routing))
    again, same_weights = arrived(transport, route, tokens, tuple(routing))
    as_gradients, no_weights = arrived(transport, route, tokens, None)
    everybody = [inputs(scenario, other, HIDDEN) for other in range(dist.get_world_size())]
    all_tokens, all_index, all_weights = (torch.cat(parts) for parts in zip(*everybody, strict=True))
    end = 0
    for local, count in enumerate(route.counts.tolist()):
        token, slot = (all_index == rank * scenario.experts + local).nonzero(as_tuple=True)
        start, end = end, end + count
        order = weights[start : start + len(token)].argsort()
        by_weight = all_weights[token, slot].argsort()
        torch.testing.assert_close(
            rows[start : start + len(token)][order], all_tokens[token][by_weight], rtol=0, atol=0
        )
        torch.testing.assert_close(
            weights[start : start + len(token)].sort().values, all_weights[token, slot].sort().values
        )
        assert not rows[start + len(token) : end].any() and not weights[start + len(token) : end].any(), "a gap"
    assert rows.shape[0] == end and route.rows_per_expert == route.counts.tolist()
    assert torch.equal(again, rows) and torch.equal(as_gradients, rows), "other rows along the route"
    assert torch.equal(same_weights, weights) and no_weights is None


def arrived(transport: Transport, route: Route, tokens: Tensor, routing: tuple | None) -> tuple[Tensor, Tensor | None]:
    transfer = (routing and route.take_first()) or transport.send(route, tokens, routing)
    transfer.wait()
    rows, weights, _ = transport.received(route, transfer.tensors)
    return rows, weights


def shares(engine: Engine) -> None:
    """Other modules' transports use the same buffer, which grows by powers of two."""
    CALLS.clear()
    for tokens in ((7, 5, 12, 3), (50, 64, 9, 1), (30, 100, 2, 65), (128, 7, 7, 7), (7, 5, 12, 3)):
        engine.check(replace(UNEVEN, tokens=tokens))
    assert CALLS["build buffer"] <= 2, dict(CALLS)


def interleaves(engine: Engine) -> None:
    """Several calls are under way at once, and their backwards come in any order."""
    transport = engine.build()
    scenarios = [replace(UNEVEN, tokens=tokens) for tokens in ((7, 5, 12, 3), (2, 9, 1, 4), (5, 5, 6, 0))]
    started = [start(transport, scenario) for scenario in scenarios]
    outputs = [finish() for _, finish in started]
    for which in (1, 0, 2):
        (leaves, _), output = started[which], outputs[which]
        truth, *gradients = expected(scenarios[which], HIDDEN)
        torch.testing.assert_close(output, truth, rtol=1e-5, atol=1e-5)
        output.square().sum().backward()
        for leaf, gradient in zip(leaves, gradients, strict=False):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-5)


def start(transport: Transport, scenario: Scenario) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Send a rank's tokens on their way: the leaves whose gradients can be looked at, and what waits for the output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, index, weights = inputs(scenario, rank, HIDDEN)
    leaves = [tokens.requires_grad_(), weights.requires_grad_()]
    dispatcher = TransportDispatcher(transport)
    under_way = dispatcher.start_dispatch(tokens, index, weights)

    def finish() -> Tensor:
        arrived = dispatcher.finish_dispatch(under_way)
        scale = factors(scenario.experts * size, HIDDEN)[rank * scenario.experts : (rank + 1) * scenario.experts]
        row = torch.arange(arrived.rows.num_rows)
        expert = torch.searchsorted(arrived.rows.offsets.long(), row, right=True).clamp(max=scenario.experts - 1)
        weighted = arrived.tokens * scale[expert] * arrived.row_weights.unsqueeze(1)
        return dispatcher.combine(weighted, arrived.state)

    return leaves, finish


def reads_back_once(engine: Engine) -> None:
    """The host looks at the numbers of rows, once a route, and at nothing else that is on the device."""
    transport = engine.build()
    # Builds what is built once.
    check(transport, UNEVEN, HIDDEN)
    with host_reads(engine_files="emulation") as seen:
        start(transport, UNEVEN)[1]().sum().backward()
    # The agreement on a capacity is between the hosts, and so is the mesh.
    on_device = [where for where in seen if "capacity" not in where and "buffers" not in where]
    assert on_device == [f"tolist in {Path(sys.modules[engine.kind.__module__].__file__).name}"], seen


CALLED = (shares, interleaves, reads_back_once)
