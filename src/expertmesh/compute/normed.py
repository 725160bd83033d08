"""Experts whose outputs pass a norm before they are weighted (`has_post_expert_norm`): left to autograd.

The norm's own parameter needs its gradient, so the rows are not summed inside one function as in `routed.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.routed import ExpertTensors
from expertmesh.dispatch.rows import ExpertRows


def normed_experts(
    compute: ExpertCompute,
    weights: ExpertTensors,
    tokens: Tensor,
    row_weights: Tensor,
    rows: ExpertRows,
    norm: nn.Module,
) -> Tensor:
    """As `compute` does, with `norm` applied to every row before its weight: `out_t = sum_p w_p norm(y_p)`."""
    (all_rows,) = rows.split([rows.num_rows])
    gathered = all_rows.gather(tokens)
    each_for_itself = ExpertRows(None, rows.rows_per_expert, rows.offsets, rows.num_rows)
    result = compute(weights, gathered, torch.ones_like(row_weights), each_for_itself)
    if rows.token_index is None:
        # What lies behind the last expert's rows must not reach the norm, nor must its gradient.
        belongs = rows.belongs_to_expert()
        weighted = norm(torch.where(belongs, result, 0)).float() * row_weights.unsqueeze(1)
        return torch.where(belongs, weighted, 0).to(tokens.dtype)
    weighted = norm(result).float() * row_weights.unsqueeze(1)
    output = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    return output.index_add(0, rows.token_index, weighted).to(tokens.dtype)
