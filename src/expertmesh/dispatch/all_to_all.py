"""Tokens travel by two all-to-alls: one of counts, one of rows. Works on any backend of torch.distributed.

A token goes once to each *rank* that holds one of its experts, not once per expert, and comes back as one weighted sum
per rank. With top-8 on 2 ranks that is a quarter of the bytes of sending (token, expert) pairs.

Example: 4 experts on 2 ranks, top-2. Rank 0 has tokens t0 -> (E0, E1), t1 -> (E1, E2); rank 1 has t2 -> (E2, E3)::

    rank            0                           1
    experts         E0, E1                      E2, E3
    tokens          t0, t1                      t2
    sends to 0      t0, t1                      nothing
    sends to 1      t1                          t2
    received        t0, t1                      t1, t2
    rows            E0: t0   E1: t0, t1         E2: t1, t2   E3: t2
    sends back      w00 E0(t0) + w01 E1(t0),    w12 E2(t1),
                    w11 E1(t1)                  w22 E2(t2) + w23 E3(t2)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher, local_rows


@dataclass(frozen=True)
class Exchange:
    """Who sends which token where, fixed by `dispatch` and used in both directions.

    Attributes:
        ep_mesh: the EP group, as a 1-D mesh.
        num_tokens: `T`.
        sent_token: `[sent]` int64, the token of each sent row, grouped by destination rank.
        send_sizes: rows to each rank.
        recv_sizes: rows from each rank.
    """

    ep_mesh: DeviceMesh
    num_tokens: int
    sent_token: Tensor
    send_sizes: list[int]
    recv_sizes: list[int]

    def send(self, rows: Tensor) -> Tensor:
        """`[sent, width]` rows to the ranks of the experts: `[received, width]`."""
        return wait_tensor(all_to_all_single(rows, self.recv_sizes, self.send_sizes, self.ep_mesh))

    def send_back(self, rows: Tensor) -> Tensor:
        """`[received, width]` rows back to the ranks of the tokens: `[sent, width]`."""
        return wait_tensor(all_to_all_single(rows, self.send_sizes, self.recv_sizes, self.ep_mesh))

    def sum_by_token(self, sent_rows: Tensor) -> Tensor:
        """Add the rows `[sent, width]` of each token up to `[tokens, width]`, in float32, returned in their dtype."""
        total = torch.zeros(self.num_tokens, sent_rows.shape[1], dtype=torch.float32, device=sent_rows.device)
        # A strided source would make index_add_ ten times as slow.
        return total.index_add_(0, self.sent_token, sent_rows.float().contiguous()).to(sent_rows.dtype)


class AllToAllDispatcher(TokenDispatcher[Exchange]):
    """See the module's docstring.

    Holds the mesh and not its process group: a group that somebody still holds survives `destroy_process_group`, and
    gloo's threads then race with the end of the interpreter (pytorch#179291).

    Args:
        ep_mesh: the EP group, as a 1-D mesh.
        num_experts: `E`, over all ranks of the group.
    """

    def __init__(self, ep_mesh: DeviceMesh, num_experts: int) -> None:
        self.ep_mesh = ep_mesh
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_mesh.size()

    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched[Exchange]:
        """See `TokenDispatcher.dispatch`. Reads from the device once, to learn the sizes."""
        exchange, counts, rows_per_expert = self._plan(top_k_index)
        tokens, weights, expert_ids = _Dispatch.apply(hidden_states, top_k_weights.float(), top_k_index, exchange)
        first = self.ep_mesh.get_local_rank() * self.num_local_experts
        local_ids = expert_ids - first
        elsewhere = (local_ids < 0) | (local_ids >= self.num_local_experts)
        local_ids = local_ids.masked_fill(elsewhere, self.num_local_experts)
        rows, row_weights = local_rows(local_ids, weights, counts, rows_per_expert)
        return Dispatched(tokens, row_weights, rows, exchange)

    def combine(self, expert_output: Tensor, state: Exchange) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return _Combine.apply(expert_output, state)

    def _plan(self, top_k_index: Tensor) -> tuple[Exchange, Tensor, list[int]]:
        """The exchange of counts, and the one read-back of the layer.

        Returns:
            The exchange, and the rows of each local expert on the device and on the host.
        """
        num_tokens, ep_size = top_k_index.shape[0], self.ep_mesh.size()
        picked = torch.zeros(num_tokens, self.num_experts, dtype=torch.bool, device=top_k_index.device)
        picked = picked.scatter_(1, top_k_index, True).view(num_tokens, ep_size, self.num_local_experts)
        goes_to = picked.any(2)
        # Each rank is told how many tokens it gets, and how many rows each of its experts gets out of them.
        send_counts = torch.cat([goes_to.sum(0).unsqueeze(1), picked.sum(0)], dim=1)
        recv_counts = wait_tensor(all_to_all_single(send_counts, None, None, self.ep_mesh))
        counts = recv_counts[:, 1:].sum(0)
        sizes = torch.cat([send_counts[:, 0], recv_counts[:, 0], counts]).tolist()
        send_sizes, recv_sizes = sizes[:ep_size], sizes[ep_size : 2 * ep_size]
        sent_token = torch.nonzero_static(goes_to.t(), size=sum(send_sizes))[:, 1].contiguous()
        exchange = Exchange(self.ep_mesh, num_tokens, sent_token, send_sizes, recv_sizes)
        return exchange, counts, sizes[2 * ep_size :]


class _Dispatch(torch.autograd.Function):
    """One all-to-all carries a token with its routing weights and expert ids; one brings both gradients back."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_states: Tensor,
        top_k_weights: Tensor,
        top_k_index: Tensor,
        exchange: Exchange,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        routing = torch.cat([top_k_weights, top_k_index.to(torch.int32).view(torch.float32)], dim=1)
        sent = _pack(hidden_states, routing, exchange.sent_token)
        tokens, routing = _unpack(exchange.send(sent), hidden_states.shape[1])
        weights, expert_ids = routing.chunk(2, dim=1)
        expert_ids = expert_ids.view(torch.int32).to(torch.int64)
        ctx.mark_non_differentiable(expert_ids)
        return tokens, weights.contiguous(), expert_ids

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_tokens: Tensor, grad_weights: Tensor, _: None
    ) -> tuple[Tensor, Tensor, None, None]:
        exchange = ctx.exchange
        returned = exchange.send_back(_pack(grad_tokens, grad_weights))
        grad_hidden, grad_routing = _unpack(returned, grad_tokens.shape[1])
        return exchange.sum_by_token(grad_hidden), exchange.sum_by_token(grad_routing), None, None


class _Combine(torch.autograd.Function):
    """One all-to-all brings the experts' weighted sums back; one takes their gradients to the experts."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, expert_output: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum_by_token(exchange.send_back(expert_output.contiguous()))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        return exchange.send(grad.index_select(0, exchange.sent_token)), None


def _pack(features: Tensor, extra: Tensor, index: Tensor | None = None) -> Tensor:
    """Rows `[n, width]` of `features`' dtype that carry float32 `extra` bit for bit behind the features.

    Args:
        features: `[m, hidden]`.
        extra: `[m, columns]` float32.
        index: `[n]` rows to take; all of them if omitted.
    """
    extra = (extra if index is None else extra.index_select(0, index)).contiguous().view(features.dtype)
    hidden = features.shape[1]
    packed = features.new_empty(extra.shape[0], hidden + extra.shape[1])
    if index is None:
        packed[:, :hidden].copy_(features)
    else:
        torch.index_select(features, 0, index, out=packed[:, :hidden])
    packed[:, hidden:].copy_(extra)
    return packed


def _unpack(packed: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """The inverse of `_pack`: a view of the features and a float32 copy of the extra columns."""
    return packed[:, :hidden], packed[:, hidden:].contiguous().view(torch.float32)
