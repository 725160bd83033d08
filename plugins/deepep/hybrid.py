"""DeepEP's branch hybrid-ep, `HybridEPBuffer`: rows arrive sorted by expert. For GPUs that NVLink joins.

What is not obvious:

- All ranks must bring equally many tokens, and more than ever before make the engine build its buffer anew, under every
  handle in flight. So tokens are filled up to a capacity that all agree on, and each capacity has its own buffer. The
  tokens that were added pick no expert, and do not travel.
- An index of -1 is illegal, so the routing is told as a dense map, and weights as a dense matrix. Their gradients come
  back dense too, and the picked ones are taken out.
- The layout costs the host one wait. It is another one each time, even for the same routing: whatever travels later, in
  a recomputation or in backward, goes along the first handle. Along a handle the engine must be told the number of
  rows, and the padding, or gaps are left as they were.
- It has no events: all runs on the current stream.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from expertmesh_plugins.deepep.buffers import shared_buffer
from expertmesh_plugins.deepep.engine import ROWS_MULTIPLE, load, unavailable, unsuitable
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from expertmesh.dispatch.capacity import Capacity
from expertmesh.dispatch.requirements import hopper, refuse_late
from expertmesh.dispatch.transport import Route, Situation, Transfer, Transport

# The engine's own variable, for machines whose NVLink reaches further than a node.
_DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


@dataclass
class Sent:
    """What the first dispatch left.

    Attributes:
        buffer: the buffer that the handle belongs to.
        handle: HybridEP's own.
        capacity: tokens of each rank, with those that were added.
        num_rows: rows of this rank, with their padding.
        top_k_index: `[tokens, top_k]` int64.
        weights: `[rows]` float32, zero in gaps.
    """

    buffer: Any
    handle: tuple
    capacity: int
    num_rows: int
    top_k_index: Tensor
    weights: Tensor

    def transfer(self, rows: Tensor, is_routed: bool) -> Transfer:
        """Rows that travel along the handle, as `Transport.send` returns them."""
        return Transfer((rows, self.weights.detach() if is_routed else None, None))


class HybridEP(Transport):
    """See the module's docstring."""

    brings_rows = True

    def __init__(self, ep_mesh: DeviceMesh, situation: Situation) -> None:
        super().__init__(ep_mesh, situation)
        self._engine = load()
        self._capacity = Capacity(ep_mesh)

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """See `Transport.refusal`."""
        return (
            unavailable("HybridEPBuffer")
            or unsuitable(situation)
            or _out_of_reach(situation)
            or hopper(situation)
            or _odd(situation)
        )

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """See `Transport.plan`. Sends the tokens too.

        Raises:
            ConfigError: see `refuse_late`.
        """
        refuse_late("hybridep", self.situation, hidden, unsuitable)
        capacity = self._capacity.at_least(hidden.shape[0])
        buffer = self._buffer(capacity)
        probs = hidden.new_zeros(capacity, self.situation.num_experts, dtype=torch.float32)
        routing_map = torch.zeros_like(probs, dtype=torch.bool)
        rows, weights, _, counts, handle = buffer.dispatch_with_permute(
            hidden=_filled_up(hidden, capacity),
            routing_map=routing_map.scatter_(1, top_k_index, True),
            probs=probs.scatter_(1, top_k_index, top_k_weights),
            pad_multiple=ROWS_MULTIPLE,
        )
        # The engine has waited for them: they are on the host.
        rows_per_expert = counts.tolist()
        sent = Sent(buffer, handle, capacity, sum(rows_per_expert), top_k_index, weights)
        on_device = counts.to(hidden.device, non_blocking=True)
        return Route(hidden.shape[0], on_device, rows_per_expert, sent, sent.transfer(rows, is_routed=True))

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. Along the handle, without a layout and without a wait."""
        sent: Sent = route.handle
        rows, *_ = sent.buffer.dispatch_with_permute(
            hidden=_filled_up(hidden, sent.capacity),
            handle=sent.handle,
            num_permuted_tokens=sent.num_rows,
            pad_multiple=ROWS_MULTIPLE,
        )
        return sent.transfer(rows, is_routed=routing is not None)

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        sent: Sent = route.handle
        hidden, probs = sent.buffer.combine_with_unpermute(
            hidden=rows, probs=weights, handle=sent.handle, pad_multiple=ROWS_MULTIPLE
        )
        size = route.num_tokens
        return Transfer((hidden[:size], None if weights is None else probs[:size].gather(1, sent.top_k_index)))

    def _buffer(self, capacity: int) -> Any:
        sizes = (self.situation.hidden, capacity, self.situation.num_local_experts)
        return shared_buffer(
            ("HybridEPBuffer", *sizes),
            self.ep_mesh,
            lambda: self._engine.HybridEPBuffer(self.ep_mesh.get_group(), *sizes),
        )


def _filled_up(tokens: Tensor, capacity: int) -> Tensor:
    return pad(tokens, (0, 0, 0, capacity - tokens.shape[0])) if tokens.shape[0] < capacity else tokens


def _out_of_reach(situation: Situation) -> str | None:
    domain = int(os.environ.get(_DOMAIN, "0"))
    if domain % situation.ep_size == 0 if domain else situation.is_inside_node:
        return None
    return (
        f"it reaches the GPUs that NVLink joins, and an EP group of {situation.ep_size} ranks goes beyond "
        f"{domain or situation.ranks_per_node}: lower ep_size, or set {_DOMAIN} to the ranks that NVLink does join."
    )


def _odd(situation: Situation) -> str | None:
    if situation.hidden % 16:
        return f"it takes a hidden size that is a multiple of 16, and this is {situation.hidden}: use all_to_all."
    if situation.num_experts % 4:
        return f"it takes experts by fours, and these are {situation.num_experts}: use all_to_all."
    if situation.num_local_experts > 1024:
        return f"it takes 1024 experts a rank, and {situation.num_local_experts} are: raise ep_size."
    return None
