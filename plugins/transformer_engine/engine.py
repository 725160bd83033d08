"""Finding Transformer Engine, and saying why it, or its `pytorch.ep`, cannot be used."""

from __future__ import annotations

import importlib
from types import ModuleType

from packaging.version import Version

from expertmesh.dispatch.requirements import device_and_dtype, hopper
from expertmesh.dispatch.transport import Situation

# The first that sizes what is received by what arrives, and takes ranks that get nothing.
_OLDEST = Version("2.19")
_INSTALL = (
    f"install Transformer Engine {_OLDEST} or newer on a CUDA machine: "
    f'`pip install --no-build-isolation "transformer_engine[pytorch]>={_OLDEST}"`.'
)
_NCCL = 'install PyTorch 2.14 or newer, or `pip install "nvidia-nccl-cu13>=2.30.4" --no-deps`.'


def load(part: str = "transformer_engine.pytorch.ep") -> ModuleType:
    """A module of Transformer Engine. The import of `ep` registers the operators `torch.ops.transformer_engine_ep`.

    Raises:
        ImportError: it cannot be imported, for whatever reason.
    """
    try:
        return importlib.import_module(part)
    # Its import looks for shared objects of CUDA, cuDNN and NCCL, and complains in as many ways.
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def missing(part: str) -> str | None:
    """Why a module of Transformer Engine cannot be imported, or is too old; None if it can be used."""
    # An older one has no `ep`: that is what to say then, and not that a module is missing.
    try:
        package = load("transformer_engine")
    except ImportError as error:
        return f"transformer_engine cannot be imported ({error}): {_INSTALL}"
    if Version(package.__version__) < _OLDEST:
        return f"the installed transformer_engine is {package.__version__}: {_INSTALL}"
    try:
        load(part)
    except ImportError as error:
        return f"transformer_engine's PyTorch part cannot be imported ({error}): {_INSTALL}"
    return None


def unavailable() -> str | None:
    """Why `ep` is not there, or will not work with this machine's NCCL; None if it should."""
    reason = missing("transformer_engine.pytorch.ep")
    if reason is not None:
        return reason
    try:
        load("transformer_engine").require_nccl_ep()
    except RuntimeError as error:
        return f"{str(error).rstrip('.')}: {_NCCL}"
    return None


def unsuitable(situation: Situation) -> str | None:
    """Why it does not serve a situation, whatever else the process does; None if it may."""
    reason = device_and_dtype(load(), situation) or hopper(situation)
    if reason is not None:
        return reason
    if situation.ep_size < 2:
        return f"it needs two ranks or more, and ep_size is {situation.ep_size}: raise ep_size."
    if situation.hidden % 8:
        return f"it takes a hidden size that is a multiple of 8, and this is {situation.hidden}: use all_to_all."
    return None
