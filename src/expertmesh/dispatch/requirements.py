"""What engines for GPUs have in common to ask, and how it is refused: with the remedy, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError

_HOPPER = (9, 0)


def device_and_dtype(engine: ModuleType, situation: Situation) -> str | None:
    """Why an engine does not serve a device or a dtype; None if it does.

    Args:
        engine: its module. One that serves more than CUDA and bfloat16 says so in `DEVICE_TYPES` and `DTYPES`.
        situation: what is asked for.
    """
    devices = getattr(engine, "DEVICE_TYPES", ("cuda",))
    dtypes = getattr(engine, "DTYPES", (torch.bfloat16,))
    if situation.device.type not in devices:
        return f"it needs {' or '.join(devices)}, and tokens are on {situation.device.type}: use all_to_all there."
    if situation.dtype is not None and situation.dtype not in dtypes:
        return f"it sends bfloat16 only, and tokens are {situation.dtype}: set mixed_precision to bf16."
    return None


def is_older_than_hopper(situation: Situation) -> bool:
    """Whether the situation's device is a CUDA GPU of compute capability below 9.0."""
    return situation.device.type == "cuda" and torch.cuda.get_device_capability() < _HOPPER


def hopper(situation: Situation) -> str | None:
    """Why an engine that needs Hopper does not serve this machine's GPU; None if it does."""
    if is_older_than_hopper(situation):
        return f"it needs a GPU of Hopper's generation or newer, not {torch.cuda.get_device_name()}: use all_to_all."
    return None


def refuse_late(
    dispatcher: str, situation: Situation, tokens: Tensor, unsuitable: Callable[[Situation], str | None]
) -> None:
    """Refuse a dtype that nobody could tell before, because autocast chooses it.

    Args:
        dispatcher: what the user calls it.
        situation: what the dispatcher was built for.
        tokens: what it is given.
        unsuitable: why the engine does not serve a situation.

    Raises:
        ConfigError: the tokens' dtype does not suit. The engine itself would stop without saying what to do.
    """
    if situation.dtype is not None:
        return
    reason = unsuitable(replace(situation, dtype=tokens.dtype))
    if reason is not None:
        raise ConfigError(f"ep_dispatcher {dispatcher} cannot be used here: {reason}")
