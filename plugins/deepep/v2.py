"""DeepEP 2.1.0, `ElasticBuffer`, compact: a token goes once to each rank that needs it.

What is not obvious:

- Kernels are compiled for a capacity, the number of tokens that a rank may have, which must be the same on all ranks.
  So it is agreed on and grows by powers of two, and each capacity has its own buffer.
- Whatever travels along a handle must be told the handle's SMs and its layout again.
- Rows come in any order. Weights at slots of other ranks come as they are; those of a token are later taken from the
  rank that has the expert, so gradients there matter to nobody.
- The counts cost the host one wait; `v2_expanded` does without.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from expertmesh_plugins.deepep.buffers import shared_buffer
from expertmesh_plugins.deepep.engine import load, unavailable, unsuitable
from expertmesh_plugins.deepep.nobody import somebody
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.capacity import Capacity
from expertmesh.dispatch.requirements import hopper, refuse_late
from expertmesh.dispatch.transport import Route, Situation, Transfer, Transport


@dataclass
class Sent:
    """What the first dispatch left.

    Attributes:
        buffer: the buffer that the handle belongs to.
        handle: DeepEP's own.
        weights: what `Transport.send` returns as weights.
        local_ids: `[received, top_k]` int64, -1 at slots of other ranks; None where rows arrive.
    """

    buffer: Any
    handle: Any
    weights: Tensor
    local_ids: Tensor | None

    def transfer(self, tokens: Tensor, event: Any, is_routed: bool) -> Transfer:
        """Tokens or rows that travel along the handle, as `Transport.send` returns them."""
        routing = (self.weights, self.local_ids) if is_routed else (None, None)
        return Transfer((tokens, *(one if one is None else one.detach() for one in routing)), event.current_stream_wait)


class ElasticTransport(Transport):
    """What both layouts of an `ElasticBuffer` have in common."""

    layout: ClassVar[Mapping[str, Any]]
    """The arguments that every dispatch of this layout has."""
    counting: ClassVar[Mapping[str, Any]]
    """The arguments that only a dispatch has which plans."""

    def __init__(self, ep_mesh: DeviceMesh, situation: Situation) -> None:
        super().__init__(ep_mesh, situation)
        self._engine = load()
        self._capacity = Capacity(ep_mesh)

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """See `Transport.refusal`."""
        return unavailable("ElasticBuffer") or unsuitable(situation) or hopper(situation) or _unfit(situation)

    @abstractmethod
    def route(self, num_tokens: int, sent: Sent) -> Route:
        """The route of a dispatch."""

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """See `Transport.plan`. Sends the tokens too.

        Raises:
            ConfigError: see `refuse_late`.
        """
        refuse_late("deepep", self.situation, hidden, unsuitable)
        buffer = self._buffer(self._capacity.at_least(hidden.shape[0]), top_k_index.shape[1])
        num_tokens = hidden.shape[0]
        hidden, top_k_index, top_k_weights = somebody(hidden, top_k_index, top_k_weights)
        tokens, local_ids, weights, handle, event = buffer.dispatch(
            hidden,
            topk_idx=top_k_index.to(getattr(self._engine, "topk_idx_t", torch.int64)),
            topk_weights=top_k_weights,
            num_experts=self.situation.num_experts,
            num_max_tokens_per_rank=buffer.num_max_tokens_per_rank,
            num_sms=_num_sms(buffer, self.situation.num_experts, top_k_index.shape[1]),
            **self.layout,
            **self.counting,
            **_on_comm_stream(buffer),
        )
        sent = Sent(buffer, handle, weights, local_ids)
        route = self.route(num_tokens, sent)
        route.first = sent.transfer(tokens, event, is_routed=True)
        return route

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. Along the handle, without counts and without a wait."""
        sent: Sent = route.handle
        tokens, *_, event = sent.buffer.dispatch(
            *somebody(hidden),
            handle=sent.handle,
            num_sms=sent.handle.num_sms,
            **self.layout,
            **_on_comm_stream(sent.buffer),
        )
        return sent.transfer(tokens, event, is_routed=routing is not None)

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        sent: Sent = route.handle
        hidden, weights, event = sent.buffer.combine(
            rows, sent.handle, topk_weights=weights, num_sms=sent.handle.num_sms, **_on_comm_stream(sent.buffer)
        )
        size = route.num_tokens
        return Transfer((hidden[:size], weights if weights is None else weights[:size]), event.current_stream_wait)

    def _buffer(self, capacity: int, top_k: int) -> Any:
        hidden = self.situation.hidden
        return shared_buffer(
            ("ElasticBuffer", capacity, hidden, top_k),
            self.ep_mesh,
            lambda: self._engine.ElasticBuffer(
                self.ep_mesh.get_group(),
                num_max_tokens_per_rank=capacity,
                hidden=hidden,
                num_topk=top_k,
                explicitly_destroy=True,
            ),
        )


class DeepEPV2(ElasticTransport):
    """See the module's docstring."""

    layout: ClassVar[Mapping[str, Any]] = {"do_expand": False}
    counting: ClassVar[Mapping[str, Any]] = {"do_cpu_sync": True}

    def route(self, num_tokens: int, sent: Sent) -> Route:
        """See `ElasticTransport.route`."""
        counts = list(sent.handle.num_recv_tokens_per_expert_list)
        on_device = sent.handle.num_unaligned_recv_tokens_per_expert.long()
        return Route(num_tokens, on_device, counts, sent)

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Transport.received`."""
        tokens, weights, local_ids = tensors
        return tokens, weights, local_ids.long().masked_fill(local_ids < 0, self.situation.num_local_experts)


def _num_sms(buffer: Any, num_experts: int, top_k: int) -> int:
    try:
        return buffer.get_theoretical_num_sms(num_experts, top_k)
    # Where it cannot find out the bandwidth it divides by it.
    except ZeroDivisionError:
        return 20


def _unfit(situation: Situation) -> str | None:
    if situation.hidden % 256:
        return f"it takes a hidden size that is a multiple of 256, and this is {situation.hidden}: use all_to_all."
    joined = min(situation.ep_size, situation.ranks_per_node or situation.ep_size)
    if joined + situation.num_local_experts > 128:
        return (
            f"ranks of a node and experts of a rank may be 128 together, and these are "
            f"{joined + situation.num_local_experts}: raise ep_size."
        )
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        return "it refuses to fill memory: set torch.utils.deterministic.fill_uninitialized_memory to False."
    return None


def _on_comm_stream(buffer: Any) -> dict[str, Any]:
    """Start behind what this stream has been given so far, and let it go on."""
    return dict(previous_event=buffer.capture(), async_with_compute_stream=True, allocate_on_comm_stream=True)
