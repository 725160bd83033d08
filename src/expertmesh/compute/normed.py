"""Experts whose outputs pass a norm before they are weighted (`has_post_expert_norm`): left to autograd.

The norm's own parameter needs its gradient, so the rows are not summed inside one function as in `routed.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expertmesh.compute.routed import ExpertFunction, ExpertTensors, routed_experts
from expertmesh.dispatch.protocol import ExpertRows


def normed_experts(
    function: ExpertFunction,
    weights: ExpertTensors,
    tokens: Tensor,
    row_weights: Tensor,
    rows: ExpertRows,
    norm: nn.Module,
) -> Tensor:
    """As `routed_experts`, with `norm` applied to every row before its weight: `out_t = sum_p w_p norm(y_p)`."""
    gathered = tokens.index_select(0, rows.token_index)
    each_row = torch.arange(gathered.shape[0], device=gathered.device)
    expanded = ExpertRows(each_row, rows.rows_per_expert, rows.offsets)
    result = routed_experts(function, weights, gathered, torch.ones_like(row_weights), expanded)
    weighted = norm(result).float() * row_weights.unsqueeze(1)
    output = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    return output.index_add(0, rows.token_index, weighted).to(tokens.dtype)
