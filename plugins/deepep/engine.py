"""Finding DeepEP, of which three builds exist under one name, and saying why it cannot be used."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError

_INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
INSTALL = {
    "Buffer": f"install DeepEP 1.2.1 or newer on a CUDA machine: `{_INSTALL}`.",
    "ElasticBuffer": f"install DeepEP 2.1.0 or newer (NCCL 2.30.4 or newer): `{_INSTALL}`.",
    "HybridEPBuffer": f"install DeepEP's branch hybrid-ep: `{_INSTALL}@hybrid-ep`.",
}


def load() -> ModuleType:
    """DeepEP, whichever build is installed.

    Raises:
        ImportError: it cannot be imported, for whatever reason.
    """
    try:
        return importlib.import_module("deep_ep")
    # Its import asserts a CUDA home and the very NCCL it was linked with, and reads files that may be missing.
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def unavailable(entry: str) -> str | None:
    """Why a build of DeepEP is not there; None if it is.

    Args:
        entry: the class that only this build has.
    """
    try:
        module = load()
    except ImportError as error:
        return f"deep_ep cannot be imported ({error}): {INSTALL[entry]}"
    if not hasattr(module, entry):
        return f"the installed deep_ep has no {entry}: {INSTALL[entry]}"
    return None


def unsuitable(situation: Situation) -> str | None:
    """Why no build of DeepEP serves a device or a dtype; None if they all may."""
    module = load()
    # The real package says neither: it is CUDA and bfloat16.
    devices = getattr(module, "DEVICE_TYPES", ("cuda",))
    dtypes = getattr(module, "DTYPES", (torch.bfloat16,))
    if situation.device.type not in devices:
        return f"it needs {' or '.join(devices)}, and tokens are on {situation.device.type}: use all_to_all there."
    if situation.dtype is not None and situation.dtype not in dtypes:
        return f"it sends bfloat16 only, and tokens are {situation.dtype}: set mixed_precision to bf16."
    return None


def refuse_late(dispatcher: str, situation: Situation, tokens: Tensor) -> None:
    """Refuse a dtype that nobody could tell before, because autocast chooses it.

    Args:
        dispatcher: what the user calls it.
        situation: what the dispatcher was built for.
        tokens: what it is given.

    Raises:
        ConfigError: the tokens' dtype does not suit. The engine itself would stop without saying what to do.
    """
    if situation.dtype is not None:
        return
    reason = unsuitable(replace(situation, dtype=tokens.dtype))
    if reason is not None:
        raise ConfigError(f"ep_dispatcher {dispatcher} cannot be used here: {reason}")
