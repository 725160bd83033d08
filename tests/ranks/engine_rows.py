"""What engines that bring rows have to do besides `engine_reference.py`, and how their adapters are put to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[1]))

from emulation import precision
from emulation.collective import CALLS
from emulation.errors import EmulationError
from emulation.install import installed
from engine_reference import SCENARIOS, Scenario, check, expected, factors, inputs, situation
from host_reads import host_reads

from expertmesh.dispatch.transport import Route, Transport
from expertmesh.dispatch.transported import TransportDispatcher
from expertmesh.errors import ConfigError

HIDDEN = 128


@dataclass(frozen=True)
class Engine:
    """An engine under test.

    Attributes:
        emulation: what is installed in its place.
        kind: the adapter.
        plan, replay: what the emulation calls the dispatch that plans, and the one along a route.
        forget: undoes what the process has of the engine; collective.
    """

    emulation: str
    kind: type[Transport]
    plan: str
    replay: str
    forget: Callable[[], None]

    def build(self, scenario: Scenario = SCENARIOS["uneven"], dtype: torch.dtype | None = torch.float32) -> Transport:
        where = situation(scenario, HIDDEN, dtype)
        refused = self.kind.refusal(where)
        assert refused is None, refused
        return self.kind(init_device_mesh("cpu", (dist.get_world_size(),)), where)

    def check(self, scenario: Scenario = SCENARIOS["uneven"]) -> None:
        check(self.build(scenario), scenario, HIDDEN, repeat=2)
        lands(self.build(scenario), scenario)


@dataclass(frozen=True)
class Fault:
    """A fault to seed into an adapter.

    Attributes:
        seed: breaks the adapter while its block runs.
        noticed_by: the check that has to say something.
    """

    seed: Callable[[], AbstractContextManager]
    noticed_by: Callable[[Engine], None] = Engine.check


def replaced(owner: object, name: str, make: Callable[[Callable], Callable], **noticed) -> Fault:
    """A function or method of the adapter that is replaced by what `make` makes of it."""
    return Fault(lambda: patch.object(owner, name, make(getattr(owner, name))), **noticed)


def without_router_gradient(original: Callable) -> Callable:
    def send_back(self, route, rows, weights):
        transfer = original(self, route, rows, weights)
        if weights is not None:
            transfer.tensors = (transfer.tensors[0], torch.zeros_like(transfer.tensors[1]))
        return transfer

    return send_back


def weighted_again(original: Callable) -> Callable:
    return lambda self, route, rows, weights: original(self, route, rows * route.handle.weights.unsqueeze(1), weights)


def planned_again(original: Callable) -> Callable:
    """Recomputation finds out anew who gets what."""

    def send(self, route, hidden, routing):
        if routing is not None and route.handle.first is None:
            route.handle = self.plan(hidden, *routing).handle
        return original(self, route, hidden, routing)

    return send


def own_capacity(original: Callable) -> Callable:
    """No rank asks the others how many tokens they have."""
    return lambda capacity, num_tokens: max(num_tokens, 1)


def the_first_route(original: Callable) -> Callable:
    """What is kept for backward is kept once, and not for each call."""
    first: dict = {}

    def send_back(self, route, rows, weights):
        own = route.handle
        route.handle = first.setdefault(id(self), own)
        try:
            return original(self, route, rows, weights)
        finally:
            route.handle = own

    return send_back


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
    transfer = transport.send(route, tokens, routing)
    transfer.wait()
    rows, weights, _ = transport.received(route, transfer.tensors)
    return rows, weights


def counts(engine: Engine) -> None:
    """A route is planned once; gradients and recomputations go along it."""
    transport = engine.build()
    CALLS.clear()
    check(transport, SCENARIOS["uneven"], HIDDEN, repeat=3)
    assert CALLS[engine.plan] == 1 and CALLS[engine.replay] == 3, dict(CALLS)


def shares(engine: Engine) -> None:
    """Other modules' transports use the same buffer, which grows by powers of two."""
    CALLS.clear()
    for tokens in ((7, 5, 12, 3), (50, 64, 9, 1), (30, 100, 2, 65), (128, 7, 7, 7), (7, 5, 12, 3)):
        engine.check(replace(SCENARIOS["uneven"], tokens=tokens))
    assert CALLS["build buffer"] <= 2, dict(CALLS)


def interleaves(engine: Engine) -> None:
    """Several calls are under way at once, and their backwards come in any order."""
    transport = engine.build()
    scenarios = [replace(SCENARIOS["uneven"], tokens=tokens) for tokens in ((7, 5, 12, 3), (2, 9, 1, 4), (5, 5, 6, 0))]
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
    check(transport, SCENARIOS["uneven"], HIDDEN)
    with host_reads(engine_files="emulation") as seen:
        start(transport, SCENARIOS["uneven"])[1]().sum().backward()
    # The agreement on a capacity is between the hosts, and so is the mesh.
    on_device = [where for where in seen if "capacity" not in where and "buffers" not in where]
    assert on_device == [f"tolist in {Path(sys.modules[engine.kind.__module__].__file__).name}"], seen


def computes_in_bfloat16(engine: Engine) -> None:
    precision.ALLOW_FLOAT32 = False
    try:
        uneven = SCENARIOS["uneven"]
        check(engine.build(uneven, torch.bfloat16), uneven, HIDDEN, tolerance=0.03, dtype=torch.bfloat16)
    finally:
        precision.ALLOW_FLOAT32 = True


def refuses_what_only_autocast_tells(engine: Engine) -> None:
    """Where nobody could say before what tokens are sent in, float32 is refused when it comes."""
    precision.ALLOW_FLOAT32 = False
    try:
        transport = engine.build(dtype=None)
        with pytest.raises(ConfigError, match=r"cannot be used here: .* tokens are torch.float32: set mixed_precision"):
            transport.plan(*inputs(SCENARIOS["uneven"], dist.get_rank(), HIDDEN))
    finally:
        precision.ALLOW_FLOAT32 = True


CALLED = (counts, shares, interleaves, reads_back_once, computes_in_bfloat16, refuses_what_only_autocast_tells)


def said(run: Callable[[], object]) -> str | None:
    """What a check says against an adapter."""
    try:
        run()
    except (AssertionError, EmulationError, ConfigError, TypeError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def put_to_the_test(engine: Engine, calls: tuple[Callable[[Engine], None], ...], faults: dict[str, Fault]) -> None:
    """Print, on rank 0, what was said on each rank: of scenarios, of calls, and, where there are two, of seeded faults.

    Each fault must be noticed by both ranks at once, or one of them would wait for the other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    precision.ALLOW_FLOAT32 = True
    results: dict[str, dict[str, str | None]] = {"scenarios": {}, "calls": {}, "faults": {}}

    def note(kind: str, label: str, run: Callable[[], object]) -> None:
        results[kind][label] = said(run)
        engine.forget()

    with installed(engine.emulation):
        for label, scenario in SCENARIOS.items():
            note("scenarios", label, lambda scenario=scenario: engine.check(scenario))
        for call in (*CALLED, *calls):
            note("calls", call.__name__, lambda call=call: call(engine))
        for label, fault in faults.items() if dist.get_world_size() == 2 else ():
            with fault.seed():
                note("faults", label, lambda fault=fault: fault.noticed_by(engine))
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, results)
    if dist.get_rank() == 0:
        print(json.dumps(everybody))
    leave()
