"""`transformer_engine.pytorch.quantization`: whether 8 bits are on, by which recipe, and if the device has them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from emulation import te_device
from emulation.errors import EmulationError, require
from emulation.te_recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe


def get_device_compute_capability() -> tuple[int, int]:
    return te_device.CAPABILITY


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "Device compute capability 8.9 or higher required for FP8 execution."
    return _answer(te_device.CAPABILITY >= (8, 9), reason, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    if te_device.CAPABILITY >= (12, 0):
        reason = "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
        return _answer(False, reason, return_reason)
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return _answer(te_device.CAPABILITY >= (10, 0), reason, return_reason)


def _answer(is_available: bool, reason: str, return_reason: bool) -> bool | tuple[bool, str]:
    return (is_available, "" if is_available else reason) if return_reason else is_available


def check_recipe_support(recipe: Recipe) -> None:
    if torch.compiler.is_compiling() and isinstance(recipe, DelayedScaling):
        raise RuntimeError("DelayedScaling is not supported under torch.compile. Please use other recipes instead.")
    supported, reason = True, ""
    if isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
        supported, reason = is_fp8_available(return_reason=True)
    elif isinstance(recipe, MXFP8BlockScaling):
        supported, reason = is_mxfp8_available(return_reason=True)
    if not supported:
        raise RuntimeError(reason)


def get_default_recipe() -> Recipe:
    if is_mxfp8_available():
        return MXFP8BlockScaling()
    return Float8CurrentScaling() if te_device.CAPABILITY >= (12, 0) else DelayedScaling()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    return 32 if recipe.mxfp8() else 16


@dataclass(frozen=True)
class _State:
    enabled: bool = False
    recipe: Recipe | None = None


class FP8GlobalStateManager:
    """The process's state, as far as it is asked for."""

    _state: ClassVar[_State] = _State()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls._state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls._state.recipe if cls._state.recipe is not None else get_default_recipe()


class autocast:
    __slots__ = ("_before", "_state")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
        _graph: bool = False,
    ) -> None:
        if calibrating or _graph:
            raise EmulationError("calibration and graphs are not emulated")
        self._state = _State(enabled, recipe)
        self._before: _State | None = None

    def __enter__(self) -> autocast:
        if self._before is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        if self._state.enabled:
            # The real one takes its default then, which on Hopper is DelayedScaling.
            require(self._state.recipe is not None, "no explicit recipe")
            check_recipe_support(self._state.recipe)
        self._before, FP8GlobalStateManager._state = FP8GlobalStateManager._state, self._state
        return self

    def __exit__(self, *exception: object) -> None:
        FP8GlobalStateManager._state, self._before = self._before, None


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    warnings.warn("fp8_autocast is deprecated: use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
