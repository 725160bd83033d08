"""Transformer Engine's EP's adapter against its emulation: run by `test_engine_te_ep.py` on 2 and 4 ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import engine_rows as rows
import pytest
import torch
import torch.distributed as dist
from emulation import te_ep as emulation
from engine_checks import (
    UNEVEN,
    Engine,
    Fault,
    counts,
    own_capacity,
    planned_again,
    put_to_the_test,
    replaced,
    the_first_route,
    without_router_gradient,
)
from engine_reference import Scenario, check, inputs, situation
from engine_rows import HIDDEN
from expertmesh_plugins.transformer_engine import TransformerEngineEP, finalize, session
from torch.distributed.device_mesh import init_device_mesh

from expertmesh.dispatch.capacity import Capacity
from expertmesh.errors import ConfigError

_NUMBERS = count()
LONGER = replace(UNEVEN, tokens=(70, 5, 100, 3))


def forget() -> None:
    finalize()
    emulation.ep_finalize()


def destroys(engine: Engine) -> None:
    """The group is torn down while the process group lives, and can be created again."""
    engine.check()
    assert emulation.is_ep_bootstrapped()
    finalize()
    assert not emulation.is_ep_bootstrapped(), "the engine outlives its process group"
    finalize()
    engine.check()


def pools(engine: Engine) -> None:
    """As many buffers as calls whose backward is still to come, and no more."""
    transport = engine.build()
    gc.collect()
    for _ in range(3):
        outputs = [rows.start(transport, UNEVEN)[1]() for _ in range(4)]
        for output in outputs:
            output.sum().backward()
        del outputs, output
    made = emulation._GROUP.num_buffers
    assert 4 <= made <= 5, f"{made} buffers"


def grows(engine: Engine) -> None:
    """More tokens than ever before: between steps the group is created anew, within one that is refused."""
    transport = engine.build()
    check(transport, UNEVEN, HIDDEN)
    check(transport, LONGER, HIDDEN)
    check(transport, UNEVEN, HIDDEN)
    assert len(emulation.BUILT) >= 2 and emulation.BUILT[-1][1] == 128
    _, *routing = batch = inputs(LONGER, dist.get_rank(), HIDDEN)
    route = transport.plan(*batch)
    transport.plan(*inputs(replace(UNEVEN, tokens=(200,)), dist.get_rank(), HIDDEN))
    rows.arrived(transport, route, batch[0], tuple(routing))
    with pytest.raises(ConfigError, match=r"between a forward and its backward, .* set ep_dispatcher to another"):
        transport.send(route, batch[0], None)


def serves_one_purpose(engine: Engine) -> None:
    """Once a process: other experts, ranks and top-k are refused, and so is somebody else's group."""
    transport = engine.build()
    other = situation(Scenario(experts=2), HIDDEN)
    size = dist.get_world_size()
    assert f"serves {4 * size} experts on {size} ranks" in engine.kind.refusal(other)
    with pytest.raises(ConfigError, match=f"te_ep cannot be used here: .* serves {4 * size} experts .* use all_to_all"):
        engine.kind(transport.ep_mesh, other)
    check(transport, UNEVEN, HIDDEN)
    with pytest.raises(ConfigError, match="one top-k a process, and has 3; now 2 experts a token"):
        check(transport, replace(UNEVEN, top_k=2), HIDDEN)
    finalize()
    mesh = init_device_mesh("cpu", (size,))
    emulation.ep_bootstrap(mesh.get_group(), 4, 64, HIDDEN, 2)
    assert "something else in this process" in engine.kind.refusal(other)
    emulation.ep_finalize()


class Operators:
    """The operators, with one of them changed."""

    def __init__(self, name: str, change: Callable) -> None:
        self._name, self._change = name, change

    def __getattr__(self, name: str) -> Callable:
        original = getattr(torch.ops.transformer_engine_ep, name)
        return self._change(original) if name == self._name else original


def called_with(operator: str, change: Callable, **noticed) -> Fault:
    """An operator is called with other arguments than the adapter means to."""

    def build(original):
        def init(self, *args):
            original(self, *args)
            self._ops = Operators(operator, lambda op: lambda *arguments: op(*change(*arguments)))

        return init

    return replaced(TransformerEngineEP, "__init__", build, **noticed)


def at(position: int, change: Callable) -> Callable:
    return lambda *arguments: [change(each) if i == position else each for i, each in enumerate(arguments)]


def laid_out_anew() -> Fault:
    """The gradients of results find out anew who gets what."""
    plan, send = TransformerEngineEP.plan, TransformerEngineEP.send

    def plan_and_note(self, hidden, *routing):
        route = plan(self, hidden, *routing)
        route.routing = routing
        return route

    def send_anew(self, route, hidden, routing):
        if routing is None:
            route.handle = plan(self, hidden, *route.routing).handle
        return send(self, route, hidden, routing)

    return Fault(
        lambda: patch.multiple(TransformerEngineEP, plan=plan_and_note, send=send_anew), noticed_by=rows.interleaves
    )


def one_buffer_for_all(original: Callable) -> Callable:
    """A buffer goes back to the pool while its call still needs it."""

    def lease(self, tokens, top_k):
        taken = original(self, tokens, top_k)
        self._free.append(taken.buffer)
        return taken

    return lease


def never_returned(original: Callable) -> Callable:
    return lambda self, buffer, generation: None


FAULTS = {
    "weights in bfloat16": called_with("dispatch", at(3, torch.Tensor.bfloat16)),
    "ids in int16": called_with("prepare", at(2, torch.Tensor.short)),
    "gradients of weights in bfloat16": called_with("dispatch_bwd", at(2, torch.Tensor.bfloat16)),
    "strided tokens": called_with("dispatch", at(2, lambda tokens: tokens.t().contiguous().t())),
    "an alignment of its own for each call": called_with("prepare", at(4, lambda alignment: 8 * next(_NUMBERS))),
    "rows for the worst case": called_with(
        "combine_bwd", at(2, lambda rows: torch.empty(4 * len(rows), rows.shape[1], dtype=rows.dtype))
    ),
    "recomputation plans again": replaced(TransformerEngineEP, "send", planned_again, noticed_by=counts),
    "gradients are laid out anew": laid_out_anew(),
    "the router's gradient is dropped": replaced(TransformerEngineEP, "send_back", without_router_gradient),
    "weights are applied again": replaced(TransformerEngineEP, "send_back", rows.weighted_again),
    "another call's routing": replaced(TransformerEngineEP, "send_back", the_first_route, noticed_by=rows.interleaves),
    "one buffer for all calls": replaced(session.Session, "lease", one_buffer_for_all, noticed_by=rows.interleaves),
    "buffers are never returned": replaced(session.Session, "_take_back", never_returned, noticed_by=pools),
    "every rank has a capacity of its own": replaced(Capacity, "at_least", own_capacity),
    "a buffer from before the group was created anew": replaced(
        session.Session, "check", lambda original: lambda self, lease: None, noticed_by=grows
    ),
    "the group is never torn down": replaced(
        session.Session, "close", lambda original: lambda self: None, noticed_by=destroys
    ),
}

if __name__ == "__main__":
    engine = rows.RowsEngine("te", TransformerEngineEP, replay="combine_bwd", forget=forget)
    put_to_the_test(engine, (*rows.CALLED, destroys, pools, grows, serves_one_purpose), FAULTS)
