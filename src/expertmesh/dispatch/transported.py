"""Tokens moved by any engine: the one dispatcher for all transports."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.dispatch import ops
from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher
from expertmesh.dispatch.rows import ExpertRows, local_rows, weights_by_expert
from expertmesh.dispatch.transport import Route, Transport, TransportHandle


@dataclass(frozen=True)
class Underway:
    """Tensors of a transfer that was started, and the route they take."""

    route: Route
    tensors: list[Tensor]


_NOT_COMPILED = torch.compiler.disable(reason="tokens travel between ranks")


class TransportDispatcher(TokenDispatcher[Route]):
    """Makes what a transport does differentiable, and lays out the rows where tokens arrive.

    Args:
        transport: the engine.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.counts_on_host = not transport.brings_rows
        self._handle = TransportHandle(transport)

    @_NOT_COMPILED
    def start_dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Underway:
        """See `TokenDispatcher`."""
        routing = top_k_index.contiguous(), top_k_weights.float().contiguous()
        hidden_states = hidden_states.contiguous()
        route = ops.plan(hidden_states, *routing, self._handle)
        return Underway(route, ops.send(hidden_states, *routing, route, self._handle))

    @_NOT_COMPILED
    def finish_dispatch(self, started: Underway) -> Dispatched[Route]:
        """See `TokenDispatcher`."""
        route = started.route
        tokens, weights, expert_ids = ops.arrive(self.transport, route, started.tensors)
        if self.transport.brings_rows:
            offsets = route.counts.cumsum(0, dtype=torch.int32)
            rows = ExpertRows(None, route.rows_per_expert, offsets, tokens.shape[0])
            return Dispatched(tokens, weights, rows, route)
        if expert_ids is not None:
            weights = weights_by_expert(expert_ids, weights, route.counts.shape[0] + 1)
        rows, row_weights = local_rows(weights, route.counts, route.rows_per_expert)
        return Dispatched(tokens, row_weights, rows, route)

    @_NOT_COMPILED
    def start_combine(self, expert_output: Tensor, state: Route) -> Underway:
        """See `TokenDispatcher`."""
        return Underway(state, [ops.send_back(expert_output.contiguous(), state, self._handle)])

    @_NOT_COMPILED
    def finish_combine(self, started: Underway) -> Tensor:
        """See `TokenDispatcher`."""
        return ops.come_back(self.transport, started.route, *started.tensors)
