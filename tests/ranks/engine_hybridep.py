"""HybridEP's adapter against its emulation: run by `test_engine_hybridep.py` on 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import engine_rows as rows
import torch
import torch.distributed as dist
from emulation import hybrid_ep as emulation
from engine_checks import (
    Engine,
    Fault,
    a_buffer_a_layer,
    counts,
    own_capacity,
    planned_again,
    put_to_the_test,
    replaced,
    the_first_route,
    without_router_gradient,
)
from expertmesh_plugins.deepep import buffers, hybrid
from expertmesh_plugins.deepep.hybrid import HybridEP

from expertmesh.dispatch.capacity import Capacity


def destroys(engine: Engine) -> None:
    """Buffers go when they are told to, and handles with their routes."""
    emulation.ALIVE.clear()
    engine.check()
    assert emulation.buffers_left() == 1
    buffers.destroy_buffers()
    assert emulation.buffers_left() == 0, "a buffer outlives its process group"
    assert len(emulation.HANDLES) == 0, "a handle outlives its call"


def agrees_without_the_device(engine: Engine) -> None:
    """Ranks whose group takes nothing on the CPU agree on a capacity in a group of their own."""
    transport = engine.build()
    with patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"):
        assert Capacity(transport.ep_mesh).at_least(70 if dist.get_rank() == 0 else 3) == 128


def called_with(change: Callable[[dict], None], method: str = "dispatch_with_permute") -> Fault:
    """HybridEP is called with other arguments than the adapter means to."""

    @contextmanager
    def seed():
        original = getattr(emulation.HybridEPBuffer, method)

        def call(self, **kwargs):
            change(kwargs)
            return original(self, **kwargs)

        with patch.object(emulation.HybridEPBuffer, method, call):
            yield

    return Fault(seed)


def along_the_route(change: Callable[[dict], object]) -> Callable[[dict], None]:
    return lambda kwargs: change(kwargs) if "handle" in kwargs else None


def at_first(change: Callable[[dict], object]) -> Callable[[dict], None]:
    return lambda kwargs: None if "handle" in kwargs else change(kwargs)


def laid_out_anew() -> Fault:
    known: dict = {}

    def change(kwargs):
        if "handle" not in kwargs:
            known["routing_map"] = kwargs["routing_map"]
        else:
            del kwargs["handle"], kwargs["num_permuted_tokens"]
            kwargs.update(known)

    return called_with(change)


def added_tokens_pick_an_expert(kwargs: dict) -> None:
    routing_map = kwargs["routing_map"]
    routing_map[:, 0] |= ~routing_map.any(1)


def slots_for_experts(original: Callable) -> Callable:
    """The dense gradient of the routing is taken for one of slots."""

    def gather(self, dim, index):
        return self[:, : index.shape[1]].contiguous() if self.dtype == torch.float32 else original(self, dim, index)

    return gather


FAULTS = {
    "the number of rows is not told along the route": called_with(
        along_the_route(lambda kwargs: kwargs.pop("num_permuted_tokens"))
    ),
    "padding is not told along the route": called_with(along_the_route(lambda kwargs: kwargs.pop("pad_multiple"))),
    "another padding along the route": called_with(along_the_route(lambda kwargs: kwargs.update(pad_multiple=8))),
    "gradients are laid out anew": laid_out_anew(),
    "recomputation plans again": replaced(HybridEP, "send", planned_again, noticed_by=counts),
    "weights in bfloat16": called_with(at_first(lambda kwargs: kwargs.update(probs=kwargs["probs"].bfloat16()))),
    "gradients of weights in bfloat16": called_with(
        lambda kwargs: kwargs.update(probs=None if kwargs["probs"] is None else kwargs["probs"].bfloat16()),
        "combine_with_unpermute",
    ),
    "the routing map in int32": called_with(
        at_first(lambda kwargs: kwargs.update(routing_map=kwargs["routing_map"].int()))
    ),
    "the routing as indices with -1": called_with(
        at_first(
            lambda kwargs: kwargs.update(
                routing_map=None,
                topk_idx=torch.full((len(kwargs["hidden"]), 3), -1),
                topk_weights=torch.ones(len(kwargs["hidden"]), 3),
                num_of_experts=kwargs["routing_map"].shape[1],
            )
        )
    ),
    "added tokens pick an expert": called_with(at_first(added_tokens_pick_an_expert)),
    "tokens are not filled up": replaced(hybrid, "_filled_up", lambda original: lambda tokens, capacity: tokens),
    "every rank has a capacity of its own": replaced(Capacity, "at_least", own_capacity),
    "the router's gradient is dropped": replaced(HybridEP, "send_back", without_router_gradient),
    "the router's gradient is not picked out": replaced(torch.Tensor, "gather", slots_for_experts),
    "weights are applied again": replaced(HybridEP, "send_back", rows.weighted_again),
    "another call's handle": replaced(HybridEP, "send_back", the_first_route, noticed_by=rows.interleaves),
    "a buffer for each layer": replaced(hybrid, "shared_buffer", a_buffer_a_layer, noticed_by=rows.shares),
    "buffers are not destroyed": replaced(
        buffers, "destroy_buffers", lambda original: lambda: None, noticed_by=destroys
    ),
}

if __name__ == "__main__":
    engine = rows.RowsEngine("hybrid_ep", HybridEP, forget=buffers.destroy_buffers)
    put_to_the_test(engine, (*rows.CALLED, destroys, agrees_without_the_device), FAULTS)
