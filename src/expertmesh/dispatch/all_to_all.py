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

from expertmesh.dispatch.transport import Route, Transfer, Transport


@dataclass(frozen=True)
class Exchange:
    """Who sends which token where.

    Attributes:
        sent_token: `[sent]` int64, the token of each sent row, grouped by destination rank.
        send_sizes: rows to each rank.
        recv_sizes: rows from each rank.
        hidden: features of a token, behind which its routing travels.
    """

    sent_token: Tensor
    send_sizes: list[int]
    recv_sizes: list[int]
    hidden: int


class AllToAll(Transport):
    """See the module's docstring. Tokens may pick one expert twice."""

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """The exchange of counts, and the one read-back of the layer."""
        num_tokens, ep_size = top_k_index.shape[0], self.situation.ep_size
        picked = torch.zeros(num_tokens, self.situation.num_experts, dtype=torch.bool, device=top_k_index.device)
        picked = picked.scatter_(1, top_k_index, True).view(num_tokens, ep_size, self.situation.num_local_experts)
        goes_to = picked.any(2)
        # Each rank is told how many tokens it gets, and how many rows each of its experts gets out of them.
        send_counts = torch.cat([goes_to.sum(0).unsqueeze(1), picked.sum(0)], dim=1)
        recv_counts = wait_tensor(all_to_all_single(send_counts, None, None, self.ep_mesh))
        counts = recv_counts[:, 1:].sum(0)
        sizes = torch.cat([send_counts[:, 0], recv_counts[:, 0], counts]).tolist()
        send_sizes, recv_sizes = sizes[:ep_size], sizes[ep_size : 2 * ep_size]
        sent_token = torch.nonzero_static(goes_to.t(), size=sum(send_sizes))[:, 1].contiguous()
        exchange = Exchange(sent_token, send_sizes, recv_sizes, hidden.shape[1])
        return Route(num_tokens, counts, sizes[2 * ep_size :], exchange)

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. One all-to-all carries a token with its routing weights and expert ids."""
        exchange: Exchange = route.handle
        if routing is None:
            sent = hidden.index_select(0, exchange.sent_token)
        else:
            top_k_index, top_k_weights = routing
            extra = torch.cat([top_k_weights, top_k_index.to(torch.int32).view(torch.float32)], dim=1)
            sent = _pack(hidden, extra, exchange.sent_token)
        return self._exchange(sent, exchange.recv_sizes, exchange.send_sizes)

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Transport.received`."""
        tokens, routing = _unpack(tensors[0], route.handle.hidden)
        weights, expert_ids = routing.chunk(2, dim=1)
        num_local_experts = self.situation.num_local_experts
        local_ids = expert_ids.view(torch.int32).long() - self.ep_mesh.get_local_rank() * num_local_experts
        elsewhere = (local_ids < 0) | (local_ids >= num_local_experts)
        return tokens, weights.contiguous(), local_ids.masked_fill(elsewhere, num_local_experts)

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        exchange: Exchange = route.handle
        sent = rows if weights is None else _pack(rows, weights)
        return self._exchange(sent, exchange.send_sizes, exchange.recv_sizes)

    def returned(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Transport.returned`."""
        hidden, weights = _unpack(tensors[0], route.handle.hidden)
        return _sum_by_token(route, hidden), _sum_by_token(route, weights) if weights.shape[1] else None

    def fake_received(self, received: int, hidden: Tensor, top_k_index: Tensor) -> list[Tensor]:
        """See `Transport.fake_received`."""
        extra = 2 * top_k_index.shape[1] * torch.float32.itemsize // hidden.dtype.itemsize
        return [hidden.new_empty(received, hidden.shape[1] + extra)]

    def _exchange(self, rows: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> Transfer:
        # The operator itself and not its wrapper, which would hand out a tensor subclass.
        group = self.ep_mesh.get_group().group_name
        arriving = torch.ops._c10d_functional.all_to_all_single(rows, recv_sizes, send_sizes, group)
        return Transfer((arriving,), lambda: wait_tensor(arriving))


def _sum_by_token(route: Route, sent_rows: Tensor) -> Tensor:
    """Add the rows `[sent, width]` of each token up to `[tokens, width]`, in float32, returned in their dtype."""
    total = torch.zeros(route.num_tokens, sent_rows.shape[1], dtype=torch.float32, device=sent_rows.device)
    # A strided source would make index_add_ ten times as slow.
    return total.index_add_(0, route.handle.sent_token, sent_rows.float().contiguous()).to(sent_rows.dtype)


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
    """The inverse of `_pack`: a view of the features and a float32 copy of the extra columns, if there are any."""
    return packed[:, :hidden], packed[:, hidden:].contiguous().view(torch.float32)
