"""No traffic: every expert is on this rank (`ep_size` 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher, local_rows


class LocalDispatcher(TokenDispatcher[None]):
    """Received tokens are this rank's own tokens; only the rows are laid out."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched[None]:
        """See `TokenDispatcher.dispatch`; `received` is `tokens`."""
        shape = (hidden_states.shape[0], self.num_experts)
        picked = torch.zeros(shape, dtype=torch.bool, device=top_k_index.device).scatter_(1, top_k_index, True)
        counts = picked.sum(0)
        rows, row_weights = local_rows(top_k_index, top_k_weights.float(), counts, counts.tolist())
        return Dispatched(hidden_states, row_weights, rows, None)

    def combine(self, expert_output: Tensor, state: None) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return expert_output
