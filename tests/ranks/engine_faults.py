"""Faults to seed into the engines' adapters, each of which some check must notice.

They are what went wrong in real adapters of these engines, or nearly did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from expertmesh_plugins.deepep import v1, v2, v2_expanded


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        seed: breaks the adapter while its block runs.
        scenario: in which it shows.
        repeat: how often tokens are sent along one route.
        noticed_by: the check of `engines.py` that has to notice; by default that of the numbers of one call.
    """

    seed: Callable[[], AbstractContextManager]
    scenario: str = "uneven"
    repeat: int = 1
    noticed_by: str | None = None


def replaced(owner: object, name: str, make: Callable[[Callable], Callable], **where) -> Fault:
    """A method that is replaced by what `make` makes of it."""
    return Fault(lambda: patch.object(owner, name, make(getattr(owner, name))), **where)


def _changed_call(method: str, change: Callable[[dict], None], buffer: str = "Buffer", **where) -> Fault:
    """DeepEP is called with other arguments than the adapter means to."""

    @contextmanager
    def seed():
        import deep_ep

        kind = getattr(deep_ep, buffer)
        original = getattr(kind, method)

        def call(self, *args, **kwargs):
            change(kwargs)
            return original(self, *args, **kwargs)

        with patch.object(kind, method, call):
            yield

    return Fault(seed, **where)


def _transfer_without(wait_or_position):
    def make(original):
        def send(self, *args):
            transfer = original(self, *args)
            if wait_or_position == "wait":
                transfer.wait = lambda: None
            else:
                tensors = list(transfer.tensors)
                if tensors[wait_or_position] is not None:
                    tensors[wait_or_position] = torch.zeros_like(tensors[wait_or_position])
                transfer.tensors = tuple(tensors)
            return transfer

        return send

    return make


def _set(key, value):
    def change(kwargs):
        if kwargs.get(key) is not None:
            kwargs[key] = value(kwargs[key])

    return change


def _other_sms(kwargs):
    import deep_ep

    if kwargs.get("handle") is not None:
        kwargs["config"] = deep_ep.Config(kwargs["config"].num_sms - 2, 24, 256)


def _weighted_twice(original):
    def received(self, route, tensors):
        tokens, weights, ids = original(self, route, tensors)
        return tokens, weights * weights, ids

    return received


def _global_ids(original):
    def received(self, route, tensors):
        tokens, weights, ids = original(self, route, tensors)
        return tokens, weights, (ids + 1) % (self.situation.num_local_experts + 1)

    return received


def _unmasked_gradient(original):
    def send_back(self, route, rows, weights):
        return original(self, route, rows, None if weights is None else weights + 1)

    return send_back


def _plan_again(original):
    def send(self, route, hidden, routing):
        if routing is not None and route.handle.first is None:
            route.handle = self.plan(hidden, *routing).handle
        return original(self, route, hidden, routing)

    return send


def _buffer_a_layer(original):
    count = iter(range(1000))
    return lambda kind, mesh, build: original((kind, next(count)), mesh, build)


def _the_first_call_s_route(original):
    """What backward needs is kept for each layer rather than for each call."""
    kept = {}

    def send_back(self, route, rows, weights):
        own = route.handle
        route.handle = kept.setdefault(id(self), own)
        try:
            return original(self, route, rows, weights)
        finally:
            route.handle = own

    return send_back


def _over_several_calls(module, kind):
    return {
        "recomputation plans again": replaced(kind, "send", _plan_again, noticed_by="counts"),
        "a buffer for each layer": replaced(module, "shared_buffer", _buffer_a_layer, noticed_by="shares"),
        "the route of another call": replaced(
            kind, "send_back", _the_first_call_s_route, noticed_by="keeps_calls_apart"
        ),
    }


V1 = {
    **_over_several_calls(v1, v1.DeepEPV1),
    "sent tokens are not waited for": replaced(v1.DeepEPV1, "send", _transfer_without("wait")),
    "returned results are not waited for": replaced(v1.DeepEPV1, "send_back", _transfer_without("wait")),
    "the router's gradient is dropped": replaced(v1.DeepEPV1, "send_back", _transfer_without(1)),
    "weights are applied twice": replaced(v1.DeepEPV1, "received", _weighted_twice),
    "ids are off by one": replaced(v1.DeepEPV1, "received", _global_ids),
    "gradients at other ranks' slots are not zero": replaced(v1.DeepEPV1, "send_back", _unmasked_gradient),
    "other SMs in the backward": _changed_call("dispatch", _other_sms),
    "weights in bfloat16": _changed_call("dispatch", _set("topk_weights", torch.Tensor.bfloat16)),
    "ids in int32": _changed_call("dispatch", _set("topk_idx", torch.Tensor.int)),
    "a strided input": _changed_call("dispatch", _set("topk_weights", lambda t: t.t().contiguous().t())),
    "allocated on the engine's stream without an event": _changed_call(
        "combine", lambda kwargs: kwargs.update(previous_event=None)
    ),
    "nobody stands in for no tokens": Fault(
        lambda: patch.object(v1, "somebody", lambda *tensors: tensors), scenario="a rank without tokens"
    ),
}


def _forget(*keys):
    def change(kwargs):
        for key in keys:
            kwargs.pop(key, None)

    return change


def _along_the_handle(change):
    return lambda kwargs: change(kwargs) if kwargs.get("handle") is not None else None


def _another_tokens_weights(original):
    def plan(self, hidden, index, weights):
        return original(self, hidden, index, weights.roll(1, 0))

    return plan


def _unmasked(original):
    return lambda self, route, tensors: (tensors[0], tensors[1], None)


def _unpadded_counts(original):
    def route(self, num_tokens, sent):
        made = original(self, num_tokens, sent)
        made.counts = sent.handle.num_unaligned_recv_tokens_per_expert.long()
        return made

    return route


def _capacity_of_a_batch(original):
    return lambda self, num_tokens: max(num_tokens, 1)


def _v2(method, change, **where):
    return _changed_call(method, change, buffer="ElasticBuffer", **where)


def _elastic(kind):
    return {
        **_over_several_calls(v2, kind),
        "sent tokens are not waited for": replaced(kind, "send", _transfer_without("wait")),
        "returned results are not waited for": replaced(kind, "send_back", _transfer_without("wait")),
        "the router's gradient is dropped": replaced(kind, "send_back", _transfer_without(1)),
        "the weights are another token's": replaced(kind, "plan", _another_tokens_weights),
        "SMs are left to the engine along a handle": _v2("dispatch", _along_the_handle(_forget("num_sms"))),
        "weights in bfloat16": _v2("dispatch", _set("topk_weights", torch.Tensor.bfloat16)),
        "ids in int32": _v2("dispatch", _set("topk_idx", torch.Tensor.int)),
        "an event of V1": _v2("combine", _set("previous_event", lambda event: object())),
        "allocated on the compute stream behind an event": _v2("dispatch", _forget("allocate_on_comm_stream")),
        "the capacity is this batch's": Fault(
            lambda: patch.object(v2.Capacity, "at_least", _capacity_of_a_batch(None))
        ),
        "the handle's ids are changed": replaced(kind, "received", _spoiling_the_handle),
        "nobody stands in for no tokens": Fault(
            lambda: patch.object(v2, "somebody", lambda *tensors: tensors), scenario="a rank without tokens"
        ),
    }


def _spoiling_the_handle(original):
    def received(self, route, tensors):
        route.handle.handle.topk_idx.zero_()
        return original(self, route, tensors)

    return received


V2 = {
    **_elastic(v2.DeepEPV2),
    "weights are applied twice": replaced(v2.DeepEPV2, "received", _weighted_twice),
    "ids are off by one": replaced(v2.DeepEPV2, "received", _global_ids),
    "no wait for the counts": _v2("dispatch", _set("do_cpu_sync", lambda _: False)),
}
V2_EXPANDED = {
    **_elastic(v2_expanded.DeepEPV2Expanded),
    "the layout is not said again along a handle": _v2("dispatch", _along_the_handle(_forget("do_expand"))),
    "gaps are not zeroed": _v2("dispatch", _forget("do_zero_padding")),
    "weights in gaps are not masked": replaced(v2_expanded.DeepEPV2Expanded, "received", _unmasked),
    "counts without padding": replaced(v2_expanded.DeepEPV2Expanded, "route", _unpadded_counts),
    "another padding than the counts'": _v2("dispatch", _set("expert_alignment", lambda _: 8)),
}

FAULTS: dict[str, dict[str, Fault]] = {"deepep_v1": V1, "deepep_v2": V2, "deepep_v2_expanded": V2_EXPANDED}
