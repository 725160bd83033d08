"""Finding DeepEP, of which three builds exist under one name, and saying why it cannot be used."""

from __future__ import annotations

import importlib
from types import ModuleType

from expertmesh.dispatch.requirements import device_and_dtype
from expertmesh.dispatch.transport import Situation

_INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
INSTALL = {
    "Buffer": f"install DeepEP 1.2.1 or newer on a CUDA machine: `{_INSTALL}`.",
    "ElasticBuffer": f"install DeepEP 2.1.0 or newer (NCCL 2.30.4 or newer): `{_INSTALL}`.",
    "HybridEPBuffer": f"install DeepEP's branch hybrid-ep: `{_INSTALL}@hybrid-ep`.",
}

# What experts' rows are padded to by engines that sort them: grouped GEMMs in any precision down to FP8 can do with it.
ROWS_MULTIPLE = 16


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
    return device_and_dtype(load(), situation)
