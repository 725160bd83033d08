"""The device that the emulation of Transformer Engine computes on, and what it would be able to do."""

from __future__ import annotations

import torch

# Transformer Engine computes on CUDA devices only. Tests set it: the emulation then computes on the CPU as well.
ALLOW_CPU = False
# The compute capability that recipes are checked against: Hopper's.
CAPABILITY = (9, 0)


def check_available() -> None:
    """What the constructor of a module checks, also of one on "meta"."""
    if not (ALLOW_CPU or torch.cuda.is_available()):
        raise RuntimeError("TransformerEngine needs CUDA.")


def check_input(inp: torch.Tensor) -> None:
    """What a forward checks of its input."""
    if not (ALLOW_CPU or inp.is_cuda):
        raise RuntimeError(f"TransformerEngine needs CUDA. Got input on device: {inp.device}")


def default() -> torch.device:
    """Where the real one writes "cuda" and does not ask."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu" if ALLOW_CPU else "cuda")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of `torch.autocast` on a device; None outside."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
