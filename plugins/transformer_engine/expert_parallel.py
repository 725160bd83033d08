"""Transformer Engine's `ep`, tokens by NCCL: rows arrive sorted by expert, as many as there are.

What is not obvious:

- Its functions bring derivatives of their own, and route anew each time. We use the operators beneath,
  `torch.ops.transformer_engine_ep`, along one routing: `combine_bwd` sends tokens without weights, be it gradients or a
  recomputation; `dispatch_bwd` brings gradients of tokens and weights back.
- The routing lives in a buffer, one for each call whose backward is still to come.
- What is received is sized by what arrives, which costs one read-back. A size for the worst case would cost none, but
  is `ep_size * top_k` times the tokens, kept for backward by every layer.
- All runs on the current stream. Ranks without tokens are fine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from expertmesh_plugins.transformer_engine.engine import unavailable, unsuitable
from expertmesh_plugins.transformer_engine.session import ALIGNMENT, Lease, claimed, open_session
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.requirements import refuse_late
from expertmesh.dispatch.transport import Route, Situation, Transfer, Transport


@dataclass
class Sent:
    """What the first dispatch left.

    Attributes:
        lease: the buffer with the routing.
        num_rows: rows of this rank.
        top_k: experts of a token.
        weights: `[rows]` float32.
    """

    lease: Lease
    num_rows: int
    top_k: int
    weights: Tensor

    def transfer(self, rows: Tensor, is_routed: bool) -> Transfer:
        """Rows that travel along the routing, as `Transport.send` returns them."""
        return Transfer((rows, self.weights.detach() if is_routed else None, None))


class TransformerEngineEP(Transport):
    """See the module's docstring."""

    brings_rows = True

    def __init__(self, ep_mesh: DeviceMesh, situation: Situation) -> None:
        super().__init__(ep_mesh, situation)
        self._session = open_session(ep_mesh, situation)
        self._ops = torch.ops.transformer_engine_ep

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """See `Transport.refusal`."""
        return unavailable() or unsuitable(situation) or claimed(situation)

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """See `Transport.plan`. Sends the tokens too.

        Raises:
            ConfigError: see `refuse_late` and `Session.lease`.
        """
        refuse_late("te_ep", self.situation, hidden, unsuitable)
        num_tokens, top_k = top_k_index.shape
        lease = self._session.lease(hidden, top_k)
        buffer = lease.buffer
        self._ops.prepare(
            buffer.handle_mem, top_k, top_k_index, buffer.tokens_per_expert, ALIGNMENT, buffer.total_recv_tokens
        )
        rows_per_expert = buffer.tokens_per_expert.tolist()
        rows = hidden.new_empty(sum(rows_per_expert), hidden.shape[1])
        weights = top_k_weights.new_empty(rows.shape[0])
        self._ops.dispatch(buffer.handle_mem, top_k_index, hidden, top_k_weights, rows, weights)
        sent = Sent(lease, rows.shape[0], top_k, weights)
        first = sent.transfer(rows, is_routed=True)
        return Route(num_tokens, buffer.tokens_per_expert, rows_per_expert, sent, first)

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. Along the routing in the buffer, without a wait."""
        sent: Sent = route.handle
        rows = hidden.new_empty(sent.num_rows, hidden.shape[1])
        self._ops.combine_bwd(self._routing(sent), hidden, rows)
        return sent.transfer(rows, is_routed=routing is not None)

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        sent: Sent = route.handle
        hidden = rows.new_empty(route.num_tokens, rows.shape[1])
        if weights is None:
            self._ops.combine(self._routing(sent), rows, hidden)
            return Transfer((hidden, None))
        top_k_weights = weights.new_empty(route.num_tokens, sent.top_k)
        self._ops.dispatch_bwd(self._routing(sent), rows, weights, hidden, top_k_weights)
        return Transfer((hidden, top_k_weights))

    def _routing(self, sent: Sent) -> Tensor:
        self._session.check(sent.lease)
        return sent.lease.buffer.handle_mem
