"""How one engine moves rows between the ranks of an expert-parallel group: what every engine implements.

Nothing here is differentiable and nothing here knows about recomputation; `ops.py` makes both out of these three calls.
For shapes see the legend in `protocol.py`. A transport brings one of two things to the ranks of the experts:

- *tokens* (compact): each received token once, with its routing, `[received, hidden]`; the rows are laid out from it;
- *rows* (expanded): one row for each (token, local expert) pair, sorted by expert, `[rows, hidden]`, `rows` being a
  capacity. Experts' ranges may be padded at their ends; what lies in such gaps is zero. What lies behind the last
  expert's range is arbitrary, NaN included. Counts may stay on the device.

Example: 4 experts on 2 ranks, top-2. t0 -> (E0, E1), t1 -> (E1, E2) live on rank 0, t2 -> (E2, E3) on rank 1::

    rank                       0                            1
    experts                    E0, E1                       E2, E3
    tokens arrive as           t0, t1                       t1, t2
    rows arrive as             E0: t0    E1: t0, t1         E2: t1, t2    E3: t2
    send_back takes, tokens    one weighted sum a token     one weighted sum a token
    send_back takes, rows      one weighted row a row       one weighted row a row
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.topology import UNKNOWN, Topology


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an engine is asked to do, known before the first token moves.

    Attributes:
        ep_size: ranks of the EP group.
        num_experts: over all of them.
        hidden: features of a token.
        dtype: what tokens are sent in; None where only autocast will tell.
        device: where they live.
        ranks_per_node: ranks of this job on one node; None if nobody told.
        topology: what lies between the ranks.
    """

    ep_size: int
    num_experts: int
    hidden: int
    dtype: torch.dtype | None
    device: torch.device
    ranks_per_node: int | None = None
    topology: Topology = UNKNOWN

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size

    @property
    def is_inside_node(self) -> bool:
        """Whether an EP group, being contiguous ranks, stays on one node."""
        return self.ranks_per_node is None or self.ranks_per_node % self.ep_size == 0


def _arrived() -> None:
    """Nothing to wait for."""


@dataclass
class Transfer:
    """Tensors that may still be on their way.

    Attributes:
        tensors: not to be touched before `wait` was called; no two share memory.
        wait: makes the current stream wait for them, and the host where the engine cannot do otherwise. Called once.
    """

    tensors: tuple[Tensor | None, ...]
    wait: Callable[[], None] = _arrived


class Route(OpaqueBase):
    """Where the tokens of one call of one layer go: fixed by `Transport.plan`, used by every transfer of that call.

    That is its forward, its recomputation if there is one, and its backward. It lives as long as somebody needs it.

    Args:
        num_tokens: `T`.
        counts: `[num_local_experts]` int64 on the device, rows of each local expert, with their padding.
        rows_per_expert: the same on the host, or None where nobody read them back.
        handle: whatever the engine needs.
        first: what `Transport.send` with routing would return, where `plan` sent the tokens too.
    """

    def __init__(
        self,
        num_tokens: int,
        counts: Tensor,
        rows_per_expert: list[int] | None,
        handle: Any,
        first: Transfer | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.counts = counts
        self.rows_per_expert = rows_per_expert
        self.handle = handle
        self.first = first
        # Transfers that were started and not yet waited for, by what they carry.
        self.in_flight: dict[str, Transfer] = {}

    def take_first(self) -> Transfer | None:
        """What `plan` sent, once."""
        first, self.first = self.first, None
        return first


class Transport(ABC):
    """One engine, for all layers with the same situation. Every call is collective over the EP group.

    A rank without tokens, and a rank that receives none, calls like any other. A token picks an
    expert once; engines that can take more than that may.

    Args:
        ep_mesh: the EP group, as a 1-D mesh. Hold the mesh, not its group: a group that is held outlives
            `destroy_process_group`.
        situation: what is to be done.
    """

    brings_rows = False
    """Whether rows arrive rather than tokens."""

    def __init__(self, ep_mesh: DeviceMesh, situation: Situation) -> None:
        self.ep_mesh = ep_mesh
        self.situation = situation

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """Why this engine cannot serve the situation on this machine, with the remedy; None if it can.

        Called on every rank, and by `expertmesh doctor`; must not raise, whatever is or is not installed, and must not
        communicate.
        """
        return None

    @abstractmethod
    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """Find out, together, who sends what where. Called once for each call of a layer; never in its recomputation.

        An engine that finds out by sending gives what it sent to the route; then `send` is not called in the forward.

        Args:
            hidden: `[tokens, hidden]`, contiguous.
            top_k_index: `[tokens, top_k]` int64 global expert ids, contiguous.
            top_k_weights: `[tokens, top_k]` float32, contiguous.
        """

    @abstractmethod
    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """Start sending tokens to the ranks of their experts.

        Args:
            route: made by `plan` for these tokens.
            hidden: `[tokens, hidden]`, contiguous: the planned tokens, or gradients of theirs.
            routing: `(top_k_index, top_k_weights)` as planned; None for gradients, which travel without.

        Returns:
            Compact: tokens `[received, hidden]` (a strided view will do), weights `[received, top_k]` float32 and local
            expert ids `[received, top_k]` int64, in which `num_local_experts` marks slots of other ranks (whose
            weights may be anything); or weights `[received, num_local_experts]` as of `rows.weights_by_expert`, and
            None. Expanded: rows `[rows, hidden]`, weights `[rows]` float32, zero wherever
            no real row is, and None. Without routing only the first, the others are None.
        """

    @abstractmethod
    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """Start bringing what was computed for each arrived token or row back, unweighted, to be added up by token.

        Sums are taken in float32 as far as the engine lets us.

        Args:
            route: made by `plan`.
            rows: `[received, hidden]` or `[rows, hidden]`, as `send` brought them: results, or gradients of tokens.
            weights: gradients of the weights that `send` brought, float32; zero at slots of other ranks.

        Returns:
            `[tokens, hidden]` in the dtype of `rows`, and the gradients of the routing weights `[tokens, top_k]`
            float32 (None without `weights`).
        """

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take apart what `send` with routing brought, once it is here, where it travelled in another form."""
        return tensors

    def returned(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """The same for `send_back`."""
        return tensors

    def fake_received(self, received: int, hidden: Tensor, top_k_index: Tensor) -> list[Tensor]:
        """Tensors without contents in the shapes of those that `send` with routing starts; for compilers.

        Args:
            received: `R` or `P`, a number that nobody knows yet.
            hidden, top_k_index: as `send` gets them.
        """
        if self.brings_rows:
            weights = hidden.new_empty(received, dtype=torch.float32)
            return [hidden.new_empty(received, hidden.shape[1]), weights]
        shape = (received, top_k_index.shape[1])
        weights = hidden.new_empty(shape, dtype=torch.float32)
        return [hidden.new_empty(received, hidden.shape[1]), weights, top_k_index.new_empty(shape)]


class TransportHandle(OpaqueBase):
    """A transport, as an argument of the operators in `ops.py`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport


register_opaque_type(Route, typ="reference")
register_opaque_type(TransportHandle, typ="reference")
