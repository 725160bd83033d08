"""Liger's fused linear head and cross-entropy, for CUDA. Written against liger-kernel 0.8.5.

It goes over the tokens a piece at a time and takes the gradients in the forward, so that no logits are made twice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """See `expertmesh.loss.linear_cross_entropy`. The weight's gradient is added up in float32."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum", accum_dtype=torch.float32
    )
    return loss(weight, hidden, targets, bias)
