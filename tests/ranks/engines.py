"""One engine's adapter against its emulation, on ranks: run by `test_engines.py`; rank 0 prints one JSON object.

    python engines.py <engine>

Every scenario, then what only shows over several calls, then seeded faults: each breaks the adapter in one place, and
some check has to notice. What a check says is the value, None if it says nothing.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
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

from emulation import events, handles, precision
from emulation.collective import CALLS
from emulation.errors import EmulationError
from emulation.install import installed
from engine_faults import FAULTS, Fault
from engine_reference import SCENARIOS, Scenario, check, inputs, situation
from expertmesh_plugins.deepep import buffers
from host_reads import host_reads

from expertmesh.dispatch import close_engines
from expertmesh.dispatch.registry import find_transport
from expertmesh.dispatch.transport import Transport
from expertmesh.dispatch.transported import TransportDispatcher
from expertmesh.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    """An engine under test.

    Attributes:
        emulation: what is installed in its place.
        name: of the dispatcher.
        hidden: a width that it takes.
        plan: what its emulation calls the dispatch that plans; and the one that replays.
        mesh: the ranks; by default all of them, in the default group.
    """

    emulation: str
    name: str
    hidden: int
    plan: str
    replay: str
    mesh: DeviceMesh | None = None


ENGINES = {
    "deepep_v1": Engine("deep_ep_v1", "deepep", 128, "dispatch", "cached dispatch"),
    "deepep_v2": Engine("deep_ep_v2", "deepep", 256, "dispatch", "cached dispatch"),
    "deepep_v2_expanded": Engine("deep_ep_v2", "deepep_expanded", 256, "dispatch", "cached dispatch"),
    "hybridep": Engine("hybrid_ep", "hybridep", 128, "dispatch", "cached dispatch"),
    "te_ep": Engine("te", "te_ep", 128, "dispatch", "cached dispatch"),
}


def build(engine: Engine, scenario: Scenario, dtype: torch.dtype | None = torch.float32) -> Transport:
    mesh = engine.mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    where = situation(scenario, engine.hidden, dtype)
    kind = find_transport(engine.name)
    refused = kind.refusal(where)
    assert refused is None, refused
    return kind(mesh, where)


def said(run: Callable[[], object]) -> str | None:
    """What a check says against an adapter."""
    try:
        run()
    except (AssertionError, EmulationError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def counts(engine: Engine) -> None:
    """A route is planned once; gradients and recomputations replay it."""
    scenario = SCENARIOS["uneven"]
    transport = build(engine, scenario)
    CALLS.clear()
    check(transport, scenario, engine.hidden, repeat=3)
    assert CALLS[engine.plan] == 1, dict(CALLS)
    assert CALLS[engine.replay] == 3, dict(CALLS)


def keeps_calls_apart(engine: Engine) -> None:
    """A layer that is called again, with other tokens, mixes nothing up."""
    transport = build(engine, SCENARIOS["uneven"])
    for tokens in ((7, 5, 12, 3), (2, 9, 1, 4)):
        check(transport, replace(SCENARIOS["uneven"], tokens=tokens), engine.hidden)


def shares(engine: Engine) -> None:
    """All layers with the same situation use one buffer, also those of another experts module."""
    scenario = SCENARIOS["uneven"]
    first = build(engine, scenario)
    check(first, scenario, engine.hidden)
    CALLS.clear()
    check(build(engine, scenario), scenario, engine.hidden)
    assert CALLS["build buffer"] == 0, dict(CALLS)


def overlaps(engine: Engine) -> None:
    """Two transfers are under way before one is waited for, forward and backward."""
    scenario = SCENARIOS["uneven"]
    dispatcher = TransportDispatcher(build(engine, scenario))
    batch = inputs(scenario, dist.get_rank(), engine.hidden)
    batch[0].requires_grad_()
    events.forget()
    started = [dispatcher.start_dispatch(*batch) for _ in range(2)]
    arrived = [dispatcher.finish_dispatch(each) for each in started]
    returning = [dispatcher.start_combine(torch.nan_to_num(each.tokens), each.state) for each in arrived]
    outputs = [dispatcher.finish_combine(each) for each in returning]
    forward = [what for what, _ in events.LOG if "layout" not in what]
    expected = ["start dispatch"] * 2 + ["wait dispatch"] * 2 + ["start combine"] * 2 + ["wait combine"] * 2
    assert forward == expected, forward
    events.forget()
    (outputs[0] + outputs[1]).sum().backward()
    backward = [what for what, _ in events.LOG]
    expected = [f"{do} {what}" for what in ("cached dispatch", "combine") for do in ("start",) * 2 + ("wait",) * 2]
    assert backward == expected, backward


def lets_go_of_handles(engine: Engine) -> None:
    """No handle outlives its graph, and without gradients none outlives its call."""
    scenario = SCENARIOS["uneven"]
    dispatcher = TransportDispatcher(build(engine, scenario))
    batch = inputs(scenario, dist.get_rank(), engine.hidden)
    gc.collect()
    before = len(handles.ALIVE)
    with torch.no_grad():
        arrived = dispatcher.dispatch(*batch)
        assert len(handles.ALIVE) == before + 1, "the emulation counts its handles"
        dispatcher.combine(torch.nan_to_num(arrived.tokens), arrived.state)
        del arrived
    gc.collect()
    assert len(handles.ALIVE) == before
    check(build(engine, scenario), scenario, engine.hidden)
    gc.collect()
    assert len(handles.ALIVE) == before


def reads_nothing_back(engine: Engine) -> None:
    """The host asks the device for nothing, but what the engine itself does to tell the counts."""
    scenario = SCENARIOS["uneven"]
    dispatcher = TransportDispatcher(build(engine, scenario))
    tokens, *routing = inputs(scenario, dist.get_rank(), engine.hidden)
    tokens.requires_grad_()
    with host_reads(engine_files="emulation") as seen:
        arrived = dispatcher.dispatch(tokens, *routing)
        output = dispatcher.combine(torch.nan_to_num(arrived.tokens), arrived.state)
        output.sum().backward()
    # The agreement on a capacity is between the hosts.
    assert [where for where in seen if "capacity" not in where] == [], seen


def computes_in_bfloat16(engine: Engine) -> None:
    precision.ALLOW_FLOAT32 = False
    try:
        scenario = SCENARIOS["uneven"]
        check(build(engine, scenario, torch.bfloat16), scenario, engine.hidden, tolerance=0.03, dtype=torch.bfloat16)
    finally:
        precision.ALLOW_FLOAT32 = True


def refuses_what_only_autocast_tells(engine: Engine) -> None:
    """Where nobody could say before what tokens are sent in, float32 is refused when it comes."""
    precision.ALLOW_FLOAT32 = False
    try:
        scenario = SCENARIOS["uneven"]
        transport = build(engine, scenario, dtype=None)
        with pytest.raises(ConfigError, match=r"cannot be used here: .* tokens are torch.float32: set mixed_precision"):
            transport.plan(*inputs(scenario, dist.get_rank(), engine.hidden))
    finally:
        precision.ALLOW_FLOAT32 = True


TOGETHER = {
    one.__name__: one
    for one in (
        counts,
        keeps_calls_apart,
        shares,
        overlaps,
        lets_go_of_handles,
        reads_nothing_back,
        computes_in_bfloat16,
        refuses_what_only_autocast_tells,
    )
}


def ends_with_training() -> None:
    """What the end of training calls destroys all buffers, while the process group lives."""
    assert buffers._BUFFERS
    close_engines()
    assert not buffers._BUFFERS
    close_engines()


def fault(engine: Engine, seeded: Fault) -> str | None:
    """What is said of an adapter that is broken on purpose."""
    scenario = SCENARIOS[seeded.scenario]
    # What it leaves behind, one rank waiting for another perhaps, must not reach the next one.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=10))
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(dist.get_world_size())))
    engine = replace(engine, mesh=mesh)

    def numbers(engine: Engine) -> None:
        check(build(engine, scenario), scenario, engine.hidden, repeat=seeded.repeat)

    notice = numbers if seeded.noticed_by is None else TOGETHER[seeded.noticed_by]
    with patch.dict(buffers._BUFFERS, clear=True), seeded.seed():
        return said(lambda: notice(engine))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    name = sys.argv[1]
    engine = ENGINES[name]
    precision.ALLOW_FLOAT32 = True
    results: dict[str, dict[str, str | None]] = {"scenarios": {}, "calls": {}, "faults": {}}
    with installed(engine.emulation):
        for label, scenario in SCENARIOS.items():
            results["scenarios"][label] = said(
                lambda scenario=scenario: check(build(engine, scenario), scenario, engine.hidden)
            )
        for label, together in TOGETHER.items():
            results["calls"][label] = said(lambda together=together: together(engine))
        results["calls"]["nothing seeded"] = fault(engine, Fault(nullcontext))
        # Two ranks are enough to notice them.
        for label, seeded in FAULTS[name].items() if dist.get_world_size() == 2 else ():
            results["faults"][label] = fault(engine, seeded)
        results["calls"]["destroys"] = said(ends_with_training)
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, results)
    if dist.get_rank() == 0:
        print(json.dumps(everybody))
    leave()


if __name__ == "__main__":
    main()
