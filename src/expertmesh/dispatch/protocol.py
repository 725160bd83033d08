"""What every way of moving tokens looks like from the outside.

Legend of shapes, used in all of `dispatch/` and `compute/`::

    tokens      T   tokens of this rank's batch
    top_k       K   experts a token is routed to
    hidden      H   features of a token
    received    R   tokens this rank holds after dispatch, each once however many of its experts are here
    rows        P   (received token, local expert) pairs, sorted by local expert: what the experts compute on
    num_local_experts   L   experts of this rank, E = ep_size * L of them in all

Where an engine brings rows rather than tokens, every row counts as a received token: R = P.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from expertmesh.dispatch.rows import ExpertRows

State = TypeVar("State")


@dataclass(frozen=True)
class Dispatched(Generic[State]):
    """What a dispatch brings to this rank's experts.

    Attributes:
        tokens: `[received, hidden]`, differentiable; may be a strided view of a receive buffer.
        row_weights: `[rows]` float32, the routing weight of each row, differentiable.
        rows: the plan of the computation.
        state: what the combine needs to bring the results back.
    """

    tokens: Tensor
    row_weights: Tensor
    rows: ExpertRows
    state: State


class TokenDispatcher(ABC, Generic[State]):
    """Moves tokens to the ranks of their experts and the results back.

    Both directions are differentiable, through the routing weights too, and collective over the EP group: a rank
    without tokens takes part like any other. Each has a start and a finish, between which other work can be done.
    """

    counts_on_host = True
    """Whether `ExpertRows.rows_per_expert` is known."""

    @abstractmethod
    def start_dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """Start sending each token to the ranks that hold its experts.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]` int64 global expert ids.
            top_k_weights: `[tokens, top_k]` routing weights, any floating dtype.

        Returns:
            What `finish_dispatch` takes.
        """

    @abstractmethod
    def finish_dispatch(self, started: Any) -> Dispatched[State]:
        """Wait for the tokens and lay out the rows."""

    @abstractmethod
    def start_combine(self, expert_output: Tensor, state: State) -> Any:
        """Start bringing each received token's weighted sum `[received, hidden]` back."""

    @abstractmethod
    def finish_combine(self, started: Any) -> Tensor:
        """Wait for the sums and add them up to `[tokens, hidden]`."""

    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched[State]:
        """Both halves at once."""
        return self.finish_dispatch(self.start_dispatch(hidden_states, top_k_index, top_k_weights))

    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        """Both halves at once."""
        return self.finish_combine(self.start_combine(expert_output, state))
