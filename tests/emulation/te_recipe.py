"""`transformer_engine.common.recipe`: the recipes of 8 bits, and what each makes of a tensor.

Per tensor (`Float8CurrentScaling`): `scale = largest of the format / amax`, of this tensor now. Per block
(`MXFP8BlockScaling`): 32 consecutive elements share a power of two, and a tensor and its transpose are rounded each for
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from emulation.errors import require

MX_BLOCK = 32


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)


_DTYPES = {448: torch.float8_e4m3fn, 57344: torch.float8_e5m2}


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


class Recipe:
    """What all recipes answer."""

    fp8_format: Format

    @classmethod
    def nvfp4(cls) -> bool:
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return False

    @classmethod
    def custom(cls) -> bool:
        return False

    def rounded(self, tensor: Tensor, is_gradient: bool, dim: int) -> Tensor:
        """What 8 bits leave of a matrix, in float32.

        Args:
            tensor: `[rows, columns]`.
            is_gradient: of an output; the format of the backward pass is another one where it is HYBRID.
            dim: along which it is summed over in the product, which is how blocks lie.
        """
        raise NotImplementedError

    def _range(self, is_gradient: bool) -> tuple[float, torch.dtype]:
        largest = self.fp8_format.value.max_bwd if is_gradient else self.fp8_format.value.max_fwd
        return largest, _DTYPES[largest]


@dataclass(repr=False)
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: object = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def rounded(self, tensor: Tensor, is_gradient: bool, dim: int) -> Tensor:
        require(False, "a scale of earlier steps, kept in `_extra_state`")
        return tensor


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    # Fields in the real one's order; it has three more that are no parameters of the constructor.
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def rounded(self, tensor: Tensor, is_gradient: bool, dim: int) -> Tensor:
        largest, dtype = self._range(is_gradient)
        values = tensor.float()
        amax = values.abs().amax() if values.numel() else values.new_zeros(())
        scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
        if self.use_power_2_scales:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return (values * scale).clamp(-largest, largest).to(dtype).float() / scale


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def rounded(self, tensor: Tensor, is_gradient: bool, dim: int) -> Tensor:
        if tensor.shape[0] % MX_BLOCK or tensor.shape[1] % MX_BLOCK:
            raise ValueError(f"MXFP8 requires tensor dims that are divisible by {MX_BLOCK} (got {tuple(tensor.shape)})")
        largest, dtype = self._range(is_gradient)
        blocks = tensor.float().movedim(dim, -1)
        shape = blocks.shape
        blocks = blocks.reshape(shape[0], shape[1] // MX_BLOCK, MX_BLOCK)
        amax = blocks.abs().amax(-1, keepdim=True)
        # A power of two with which the largest of the block fits.
        scale = torch.where(amax > 0, torch.exp2(-torch.ceil(torch.log2(amax / largest))), torch.ones_like(amax))
        rounded = (blocks * scale).clamp(-largest, largest).to(dtype).float() / scale
        return rounded.reshape(shape).movedim(-1, dim)


def _check(recipe: Recipe) -> None:
    assert recipe.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."
    require(recipe.backward_override is None, "NVTE_BACKWARD_OVERRIDE")
