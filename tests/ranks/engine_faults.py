"""Faults to seed into the engines' adapters, each of which some check must notice.

They are what went wrong in real adapters of these engines, or nearly did.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import torch
from engine_checks import (
    Fault,
    a_buffer_a_layer,
    counts,
    own_capacity,
    planned_again,
    replaced,
    the_first_route,
    without_router_gradient,
)
from engine_events import a_rank_without_tokens, keeps_calls_apart, shares
from expertmesh_plugins.deepep import v1, v2, v2_expanded


def _changed_call(method: str, change: Callable[[dict], None], buffer: str = "Buffer") -> Fault:
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

    return Fault(seed)


def _unwaited(original):
    def transfer_of(self, *args, **kwargs):
        transfer = original(self, *args, **kwargs)
        transfer.wait = lambda: None
        return transfer

    return transfer_of


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


def _over_several_calls(module, kind):
    return {
        "recomputation plans again": replaced(kind, "send", planned_again, noticed_by=counts),
        "a buffer for each layer": replaced(module, "shared_buffer", a_buffer_a_layer, noticed_by=shares),
        "the route of another call": replaced(kind, "send_back", the_first_route, noticed_by=keeps_calls_apart),
    }


V1 = {
    **_over_several_calls(v1, v1.DeepEPV1),
    "sent tokens are not waited for": replaced(v1.Sent, "transfer", _unwaited),
    "returned results are not waited for": replaced(v1.DeepEPV1, "send_back", _unwaited),
    "the router's gradient is dropped": replaced(v1.DeepEPV1, "send_back", without_router_gradient),
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
        lambda: patch.object(v1, "somebody", lambda *tensors: tensors), noticed_by=a_rank_without_tokens
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


def _v2(method, change):
    return _changed_call(method, change, buffer="ElasticBuffer")


def _elastic(kind):
    return {
        **_over_several_calls(v2, kind),
        "sent tokens are not waited for": replaced(v2.Sent, "transfer", _unwaited),
        "returned results are not waited for": replaced(kind, "send_back", _unwaited),
        "the router's gradient is dropped": replaced(kind, "send_back", without_router_gradient),
        "the weights are another token's": replaced(kind, "plan", _another_tokens_weights),
        "SMs are left to the engine along a handle": _v2("dispatch", _along_the_handle(_forget("num_sms"))),
        "weights in bfloat16": _v2("dispatch", _set("topk_weights", torch.Tensor.bfloat16)),
        "ids in int32": _v2("dispatch", _set("topk_idx", torch.Tensor.int)),
        "an event of V1": _v2("combine", _set("previous_event", lambda event: object())),
        "allocated on the compute stream behind an event": _v2("dispatch", _forget("allocate_on_comm_stream")),
        "the capacity is this batch's": replaced(v2.Capacity, "at_least", own_capacity),
        "the handle's ids are changed": replaced(kind, "received", _spoiling_the_handle),
        "nobody stands in for no tokens": Fault(
            lambda: patch.object(v2, "somebody", lambda *tensors: tensors), noticed_by=a_rank_without_tokens
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
