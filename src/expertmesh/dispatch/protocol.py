"""What every way of moving tokens looks like from the outside.

Legend of shapes, used in all of `dispatch/` and `compute/`::

    tokens      T   tokens of this rank's batch
    top_k       K   experts a token is routed to
    hidden      H   features of a token
    received    R   tokens this rank holds after dispatch, each once however many of its experts are here
    rows        P   (received token, local expert) pairs, sorted by local expert: what the experts compute on
    num_local_experts   L   experts of this rank, E = ep_size * L of them in all
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


@dataclass(frozen=True)
class ExpertRows:
    """Which received token goes through which local expert. Rows are sorted by expert; nobody sorts again.

    Attributes:
        token_index: `[rows]` int64, the received token of each row.
        rows_per_expert: `num_local_experts` counts on the host.
        offsets: `[num_local_experts]` int32 on the device, where each expert's rows end.
    """

    token_index: Tensor
    rows_per_expert: list[int]
    offsets: Tensor


@dataclass(frozen=True)
class Dispatched(Generic[State]):
    """What `dispatch` brings to this rank's experts.

    Attributes:
        tokens: `[received, hidden]`, differentiable; may be a strided view of a receive buffer.
        row_weights: `[rows]` float32, the routing weight of each row, differentiable.
        rows: the plan of the computation.
        state: what `combine` needs to bring the results back.
    """

    tokens: Tensor
    row_weights: Tensor
    rows: ExpertRows
    state: State


class TokenDispatcher(ABC, Generic[State]):
    """Moves tokens to the ranks of their experts and the results back.

    Both directions are differentiable, through the routing weights too, and collective over the EP group: a rank
    without tokens takes part like any other.
    """

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched[State]:
        """Send each token to the ranks that hold its experts.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]` global expert ids.
            top_k_weights: `[tokens, top_k]` routing weights, any floating dtype.
        """

    @abstractmethod
    def combine(self, expert_output: Tensor, state: State) -> Tensor:
        """Bring each received token's weighted sum `[received, hidden]` back and add them up to `[tokens, hidden]`."""


def local_rows(
    expert_ids: Tensor, top_k_weights: Tensor, counts: Tensor, rows_per_expert: list[int]
) -> tuple[ExpertRows, Tensor]:
    """Lay out the rows of this rank's experts without a sort and without a read-back.

    A token that picks one expert twice gets one row with the sum of both weights, which is the same function.

    Args:
        expert_ids: `[received, top_k]` int64 local expert ids; `num_local_experts` marks a slot of another rank.
        top_k_weights: `[received, top_k]` float32; differentiable.
        counts: `[num_local_experts]` int64, rows of each expert, on the device.
        rows_per_expert: the same counts on the host.

    Returns:
        The rows, and their weights `[rows]` float32.
    """
    num_local_experts = counts.shape[0]
    shape = (expert_ids.shape[0], num_local_experts + 1)
    picked = torch.zeros(shape, dtype=torch.bool, device=expert_ids.device).scatter_(1, expert_ids, True)
    pairs = torch.nonzero_static(picked[:, :-1].t(), size=sum(rows_per_expert))
    expert_index, token_index = pairs.unbind(1)
    rows = ExpertRows(token_index, rows_per_expert, counts.cumsum(0).to(torch.int32))
    return rows, _RowWeights.apply(top_k_weights, expert_ids, token_index, expert_index, num_local_experts)


class _RowWeights(torch.autograd.Function):
    """`[received, top_k]` weights to `[rows]` and their gradients back, without an accumulating scatter."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        top_k_weights: Tensor,
        expert_ids: Tensor,
        token_index: Tensor,
        expert_index: Tensor,
        num_local_experts: int,
    ) -> Tensor:
        ctx.save_for_backward(expert_ids, token_index, expert_index)
        ctx.num_local_experts = num_local_experts
        dense = top_k_weights.new_zeros(expert_ids.shape[0], num_local_experts + 1)
        return dense.scatter_add_(1, expert_ids, top_k_weights)[token_index, expert_index]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        expert_ids, token_index, expert_index = ctx.saved_tensors
        # The last column stays zero: it belongs to the slots of other ranks.
        dense = grad.new_zeros(expert_ids.shape[0], ctx.num_local_experts + 1)
        dense[token_index, expert_index] = grad
        return dense.gather(1, expert_ids), None, None, None, None
