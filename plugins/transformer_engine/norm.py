"""Transformer Engine's `RMSNorm` in the place of a model's. Import it only where Transformer Engine is installed."""

from __future__ import annotations

import transformer_engine.pytorch as te
from torch import nn

from expertmesh.norms import LeanRMSNorm


class RMSNorm(te.RMSNorm):
    """A norm with the Parameter of another. State dicts have the same key: there is no `_extra_state`.

    The weight is applied before the result is rounded, in float32; some families round before, which differs by a unit
    in the last place of bfloat16. The output has the weight's dtype, or autocast's.

    Args:
        norm: what it replaces, as it was recognised by what it computes; `weight_offset` 0 or 1.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, norm: LeanRMSNorm) -> None:
        weight = norm.module.weight
        super().__init__(
            tuple(weight.shape),
            eps=norm.epsilon,
            zero_centered_gamma=norm.kind.weight_offset == 1.0,
            device="meta",
            dtype=weight.dtype,
        )
        self.weight = weight
