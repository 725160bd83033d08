"""How every engine's adapter is put to the test against its emulation: what is common to all, and faults that fit all.

`engine_reference.py` has the scenarios and their arithmetic. What a check says against an adapter is its error, None if
it says nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from leaving import leave
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.append(str(Path(__file__).parents[1]))

from emulation import precision
from emulation.collective import CALLS
from emulation.errors import EmulationError
from emulation.install import installed
from engine_reference import SCENARIOS, Scenario, check, inputs, situation

from expertmesh.dispatch.transport import Transport
from expertmesh.errors import ConfigError

UNEVEN = SCENARIOS["uneven"]


@dataclass(frozen=True)
class Engine:
    """An engine under test.

    Attributes:
        emulation: what is installed in its place.
        kind: the adapter.
        hidden: a width that it takes.
        replay: what the emulation calls a dispatch along a route.
        forget: undoes, after each check, what the process has of the engine; collective.
        apart: hides what the process has of the engine from a fault, and the other way round.
        mesh: the ranks; by default all of them, in the default group.
    """

    emulation: str
    kind: type[Transport]
    hidden: int
    replay: str = "cached dispatch"
    forget: Callable[[], None] = lambda: None
    apart: Callable[[], AbstractContextManager] = nullcontext
    mesh: DeviceMesh | None = None

    def build(self, scenario: Scenario = UNEVEN, dtype: torch.dtype | None = torch.float32) -> Transport:
        where = situation(scenario, self.hidden, dtype)
        refused = self.kind.refusal(where)
        assert refused is None, refused
        return self.kind(self.mesh or init_device_mesh("cpu", (dist.get_world_size(),)), where)

    def check(self, scenario: Scenario = UNEVEN, repeat: int = 1) -> None:
        """The numbers of one call; tokens are sent `repeat` times, as recomputations do."""
        check(self.build(scenario), scenario, self.hidden, repeat)


@dataclass(frozen=True)
class Fault:
    """A fault to seed into an adapter.

    Attributes:
        seed: breaks the adapter while its block runs.
        noticed_by: the check that has to say something.
    """

    seed: Callable[[], AbstractContextManager]
    noticed_by: Callable[[Engine], object] = lambda engine: engine.check()


def replaced(owner: object, name: str, make: Callable[[Callable], Callable], **noticed) -> Fault:
    """A function or method that is replaced by what `make` makes of it."""
    return Fault(lambda: patch.object(owner, name, make(getattr(owner, name))), **noticed)


def without_router_gradient(original: Callable) -> Callable:
    def send_back(self, route, rows, weights):
        transfer = original(self, route, rows, weights)
        if weights is not None:
            transfer.tensors = (transfer.tensors[0], torch.zeros_like(transfer.tensors[1]))
        return transfer

    return send_back


def planned_again(original: Callable) -> Callable:
    """Recomputation finds out anew who gets what."""

    def send(self, route, hidden, routing):
        if routing is None:
            return original(self, route, hidden, None)
        again = self.plan(hidden, *routing)
        route.handle = again.handle
        return again.take_first()

    return send


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


def own_capacity(original: Callable) -> Callable:
    """No rank asks the others how many tokens they have."""
    return lambda capacity, num_tokens: max(num_tokens, 1)


def a_buffer_a_layer(original: Callable) -> Callable:
    layer = iter(range(1000))
    return lambda kind, mesh, build: original((*kind, next(layer)), mesh, build)


def counts(engine: Engine) -> None:
    """A route is planned once; gradients and recomputations go along it."""
    transport = engine.build()
    CALLS.clear()
    check(transport, UNEVEN, engine.hidden, repeat=3)
    assert CALLS["dispatch"] == 1 and CALLS[engine.replay] == 3, dict(CALLS)


def computes_in_bfloat16(engine: Engine) -> None:
    with patch.object(precision, "ALLOW_FLOAT32", False):
        transport = engine.build(dtype=torch.bfloat16)
        check(transport, UNEVEN, engine.hidden, tolerance=0.03, dtype=torch.bfloat16)


def refuses_what_only_autocast_tells(engine: Engine) -> None:
    """Where nobody could say before what tokens are sent in, float32 is refused when it comes."""
    with patch.object(precision, "ALLOW_FLOAT32", False):
        transport = engine.build(dtype=None)
        with pytest.raises(ConfigError, match=r"cannot be used here: .* tokens are torch.float32: set mixed_precision"):
            transport.plan(*inputs(UNEVEN, dist.get_rank(), engine.hidden))


COMMON = (counts, computes_in_bfloat16, refuses_what_only_autocast_tells)


def said(run: Callable[[], object]) -> str | None:
    """What a check says against an adapter."""
    try:
        run()
    except (AssertionError, EmulationError, ConfigError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def said_of_fault(engine: Engine, fault: Fault) -> str | None:
    """What is said of an adapter that is broken on purpose."""
    # What it leaves behind, one rank waiting for another perhaps, must not reach the next one.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=10))
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(dist.get_world_size())))
    with engine.apart(), fault.seed():
        return said(lambda: fault.noticed_by(replace(engine, mesh=mesh)))


def put_to_the_test(engine: Engine, calls: tuple[Callable[[Engine], None], ...], faults: Mapping[str, Fault]) -> None:
    """Print, on rank 0, what was said on each rank: of scenarios, of calls, and, on two ranks, of seeded faults."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    precision.ALLOW_FLOAT32 = True
    results: dict[str, dict[str, str | None]] = {"scenarios": {}, "calls": {}, "faults": {}}

    def note(kind: str, label: str, what: str | None) -> None:
        results[kind][label] = what
        engine.forget()

    with installed(engine.emulation):
        for label, scenario in SCENARIOS.items():
            note("scenarios", label, said(lambda scenario=scenario: engine.check(scenario)))
        note("calls", "nothing seeded", said_of_fault(engine, Fault(nullcontext)))
        # Two ranks are enough to notice them.
        for label, fault in faults.items() if dist.get_world_size() == 2 else ():
            note("faults", label, said_of_fault(engine, fault))
        for call in (*COMMON, *calls):
            note("calls", call.__name__, said(lambda call=call: call(engine)))
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, results)
    if dist.get_rank() == 0:
        print(json.dumps(everybody))
    leave()
