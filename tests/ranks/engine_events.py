"""What engines with streams and buffers of their own have to do besides `engine_checks.py`."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from emulation import events, handles
from engine_checks import CALLS, UNEVEN, Engine, check
from engine_reference import SCENARIOS, inputs
from expertmesh_plugins.deepep import buffers
from host_reads import host_reads

from expertmesh.dispatch import close_engines
from expertmesh.dispatch.transported import TransportDispatcher


def a_rank_without_tokens(engine: Engine) -> None:
    engine.check(SCENARIOS["a rank without tokens"])


def keeps_calls_apart(engine: Engine) -> None:
    """A layer that is called again, with other tokens, mixes nothing up."""
    transport = engine.build()
    for tokens in ((7, 5, 12, 3), (2, 9, 1, 4)):
        check(transport, replace(UNEVEN, tokens=tokens), engine.hidden)


def shares(engine: Engine) -> None:
    """All layers with the same situation use one buffer, also those of another experts module."""
    engine.check()
    CALLS.clear()
    engine.check()
    assert CALLS["build buffer"] == 0, dict(CALLS)


def overlaps(engine: Engine) -> None:
    """Two transfers are under way before one is waited for, forward and backward."""
    dispatcher = TransportDispatcher(engine.build())
    batch = inputs(UNEVEN, dist.get_rank(), engine.hidden)
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
    dispatcher = TransportDispatcher(engine.build())
    batch = inputs(UNEVEN, dist.get_rank(), engine.hidden)
    gc.collect()
    before = len(handles.ALIVE)
    with torch.no_grad():
        arrived = dispatcher.dispatch(*batch)
        assert len(handles.ALIVE) == before + 1, "the emulation counts its handles"
        dispatcher.combine(torch.nan_to_num(arrived.tokens), arrived.state)
        del arrived
    gc.collect()
    assert len(handles.ALIVE) == before
    engine.check()
    gc.collect()
    assert len(handles.ALIVE) == before


def reads_nothing_back(engine: Engine) -> None:
    """The host asks the device for nothing, but what the engine itself does to tell the counts."""
    dispatcher = TransportDispatcher(engine.build())
    tokens, *routing = inputs(UNEVEN, dist.get_rank(), engine.hidden)
    tokens.requires_grad_()
    with host_reads(engine_files="emulation") as seen:
        arrived = dispatcher.dispatch(tokens, *routing)
        output = dispatcher.combine(torch.nan_to_num(arrived.tokens), arrived.state)
        output.sum().backward()
    # The agreement on a capacity is between the hosts.
    assert [where for where in seen if "capacity" not in where] == [], seen


def ends_with_training(engine: Engine) -> None:
    """What the end of training calls destroys all buffers, while the process group lives."""
    assert buffers._BUFFERS
    close_engines()
    assert not buffers._BUFFERS
    close_engines()


CALLED = (keeps_calls_apart, shares, overlaps, lets_go_of_handles, reads_nothing_back, ends_with_training)
