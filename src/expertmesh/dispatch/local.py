"""No traffic: every expert is on this rank (`ep_size` 1)."""

from __future__ import annotations

from torch import Tensor

from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher
from expertmesh.dispatch.rows import NOT_PICKED, local_rows, weights_by_expert


class LocalDispatcher(TokenDispatcher[None]):
    """Received tokens are this rank's own tokens; only the rows are laid out."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def start_dispatch(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TokenDispatcher`; nothing is started."""
        return hidden_states, top_k_index, top_k_weights

    def finish_dispatch(self, started: tuple[Tensor, Tensor, Tensor]) -> Dispatched[None]:
        """See `TokenDispatcher`; `received` is `tokens`."""
        hidden_states, top_k_index, top_k_weights = started
        weights = weights_by_expert(top_k_index, top_k_weights.float(), self.num_experts)
        counts = weights.ne(NOT_PICKED).sum(0)
        rows, row_weights = local_rows(weights, counts, counts.tolist())
        return Dispatched(hidden_states, row_weights, rows, None)

    def start_combine(self, expert_output: Tensor, state: None) -> Tensor:
        """See `TokenDispatcher`; nothing is started."""
        return expert_output

    def finish_combine(self, started: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        return started
