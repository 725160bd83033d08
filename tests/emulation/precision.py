"""The engines send and sum bfloat16 only; parity to float32's last digits needs more."""

from __future__ import annotations

import torch

# Tests of exact mathematics set it: engines then take float32 as well.
ALLOW_FLOAT32 = False


def allowed() -> tuple[torch.dtype, ...]:
    """What tokens may be sent in."""
    return (torch.bfloat16, torch.float32) if ALLOW_FLOAT32 else (torch.bfloat16,)
