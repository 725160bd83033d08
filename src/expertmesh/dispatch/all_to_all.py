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
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from expertmesh.dispatch.rows import NOT_PICKED, weights_by_expert
from expertmesh.dispatch.transport import Route, Transfer, Transport


@dataclass
class Exchange:
    """Who sends which token where.

    Attributes:
        sent_token: `[sent]` int64, the token of each sent row, grouped by destination rank.
        sent_block: `[sent]` int64, `token * ep_size + destination`: which block of `[tokens, ep_size, ...]` is sent.
        send_sizes: rows to each rank.
        recv_sizes: rows from each rank.
        hidden: features of a token, behind which its weights travel.
        top_k_index: `[tokens, top_k]` int64 global expert ids.
        weights: `[tokens, num_experts]` float32 as of `weights_by_expert`, until they are sent.
    """

    sent_token: Tensor
    sent_block: Tensor
    send_sizes: list[int]
    recv_sizes: list[int]
    hidden: int
    top_k_index: Tensor
    weights: Tensor | None


class AllToAll(Transport):
    """See the module's docstring. Tokens may pick one expert twice.

    With a token travel its weights of the receiver's experts, `NOT_PICKED` where it has none: the receiver has nothing
    to translate.
    """

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """The exchange of counts, and the one read-back of the layer."""
        num_tokens, ep_size = top_k_index.shape[0], self.situation.ep_size
        num_local_experts = self.situation.num_local_experts
        weights = self._weights(top_k_index, top_k_weights)
        # Behind a rank's experts: whether the token picks any of them.
        picked = torch.empty(num_tokens, ep_size, num_local_experts + 1, dtype=torch.bool, device=weights.device)
        experts, goes_to = picked[..., :-1], picked[..., -1]
        torch.ne(self._by_rank(weights), NOT_PICKED, out=experts)
        torch.any(experts, 2, out=goes_to)
        # Each rank is told how many rows each of its experts gets, and out of how many tokens.
        counts = top_k_index.new_empty(2, ep_size, num_local_experts + 1)
        send_counts, recv_counts = counts
        torch.sum(picked, 0, out=send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=self.ep_mesh.get_group())
        rows_per_expert = recv_counts[:, :-1].sum(0)
        sent, received = counts.tolist()
        send_sizes, recv_sizes = ([to_rank[-1] for to_rank in side] for side in (sent, received))
        destination, sent_token = torch.nonzero_static(goes_to.t(), size=sum(send_sizes)).unbind(1)
        sent_block = torch.add(destination, sent_token, alpha=ep_size)
        exchange = Exchange(sent_token, sent_block, send_sizes, recv_sizes, hidden.shape[1], top_k_index, weights)
        on_host = [sum(of_expert) for of_expert in zip(*received, strict=True)]
        return Route(num_tokens, rows_per_expert, on_host[:-1], exchange)

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. One all-to-all carries a token with its weights."""
        exchange: Exchange = route.handle
        if routing is None:
            sent = hidden.index_select(0, exchange.sent_token)
        else:
            weights, exchange.weights = exchange.weights, None
            if weights is None:
                weights = self._weights(*routing)
            sent, features, extra = self._new_packed(hidden, exchange.sent_token.shape[0])
            torch.index_select(hidden, 0, exchange.sent_token, out=features)
            torch.index_select(self._by_rank(weights).flatten(0, 1), 0, exchange.sent_block, out=extra)
        return self._exchange(sent, exchange.recv_sizes, exchange.send_sizes)

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, None]:
        """See `Transport.received`."""
        return *self._unpacked(tensors[0], route.handle.hidden), None

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        exchange: Exchange = route.handle
        sent = rows
        if weights is not None:
            sent, features, extra = self._new_packed(rows, rows.shape[0])
            features.copy_(rows)
            extra.copy_(weights)
        return self._exchange(sent, exchange.send_sizes, exchange.recv_sizes)

    def returned(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Transport.returned`."""
        exchange: Exchange = route.handle
        arrived = tensors[0]
        if arrived.shape[1] == exchange.hidden:
            return _sum_by_token(route, arrived), None
        features, extra = self._unpacked(arrived, exchange.hidden)
        blocks = extra.new_zeros(route.num_tokens * self.situation.ep_size, extra.shape[1])
        by_expert = blocks.index_copy_(0, exchange.sent_block, extra).view(-1, self.situation.num_experts)
        return _sum_by_token(route, features), by_expert.gather(1, exchange.top_k_index)

    def fake_received(self, received: int, hidden: Tensor, top_k_index: Tensor) -> list[Tensor]:
        """See `Transport.fake_received`."""
        return [hidden.new_empty(received, self._width(hidden))]

    def _exchange(self, rows: Tensor, recv_sizes: list[int], send_sizes: list[int]) -> Transfer:
        # The operator itself and not its wrapper, which would hand out a tensor subclass.
        group = self.ep_mesh.get_group().group_name
        arriving = torch.ops._c10d_functional.all_to_all_single(rows, recv_sizes, send_sizes, group)
        return Transfer((arriving,), lambda: wait_tensor(arriving))

    def _weights(self, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return weights_by_expert(top_k_index, top_k_weights, self.situation.num_experts)

    def _by_rank(self, weights: Tensor) -> Tensor:
        """`[tokens, ep_size, num_local_experts]`."""
        return weights.unflatten(1, (self.situation.ep_size, self.situation.num_local_experts))

    def _new_packed(self, like: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialised rows that carry float32 numbers bit for bit behind features: whole, and views of both parts.

        Args:
            like: `[n, hidden]`, features.
            num_rows: how many rows.
        """
        packed = like.new_empty(num_rows, self._width(like))
        return packed, *self._unpacked(packed, like.shape[1])

    def _unpacked(self, packed: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
        """Views of the features and of the float32 numbers behind them."""
        start = _floats(hidden, packed.dtype)
        numbers = packed.view(torch.float32)[:, start : start + self.situation.num_local_experts]
        return packed[:, :hidden], numbers

    def _width(self, features: Tensor) -> int:
        """Elements of a packed row."""
        num_floats = _floats(features.shape[1], features.dtype) + self.situation.num_local_experts
        return -(-num_floats * torch.float32.itemsize // features.dtype.itemsize)


def _floats(num_elements: int, dtype: torch.dtype) -> int:
    """How many float32 numbers are as long as some elements, or longer."""
    return -(-num_elements * dtype.itemsize // torch.float32.itemsize)


def _sum_by_token(route: Route, sent_rows: Tensor) -> Tensor:
    """Add the rows `[sent, hidden]` of each token up to `[tokens, hidden]`, in float32, returned in their dtype."""
    total = torch.zeros(route.num_tokens, sent_rows.shape[1], dtype=torch.float32, device=sent_rows.device)
    # A strided source would make index_add_ ten times as slow.
    return total.index_add_(0, route.handle.sent_token, sent_rows.float().contiguous()).to(sent_rows.dtype)
