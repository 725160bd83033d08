"""Transformer Engine 2.20.2 as far as it is used: `transformer_engine`, its `common`, and its `pytorch`.

Modules compute what the real ones compute, in plain PyTorch. As there, constructors and forwards ask for a GPU, unless
`te_device.ALLOW_CPU` is set. `ep` is an emulation of its own, see `te_ep`.
"""

from __future__ import annotations

import sys

from emulation import te_device
from emulation import te_ep as ep
from emulation import te_quantization as quantization
from emulation import te_recipe as recipe
from emulation.te_attention import DotProductAttention
from emulation.te_ep import require_nccl_ep
from emulation.te_modules import GroupedLinear, Linear, RMSNorm
from emulation.te_permutation import (
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_unpermute,
)
from emulation.te_quantization import (
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_device_compute_capability,
    is_fp8_available,
    is_mxfp8_available,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "common",
    "ep",
    "fp8_autocast",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_fp8_available",
    "is_mxfp8_available",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_unpermute",
    "pytorch",
    "quantization",
    "recipe",
    "require_nccl_ep",
]

# One module stands for three packages.
common = pytorch = sys.modules[__name__]


def __getattr__(name: str) -> object:
    # Tests of the dispatcher make it an older one there.
    if name == "__version__":
        return ep.__version__
    # The real one has none: it takes CUDA's tensors.
    if name == "DEVICE_TYPES":
        return ("cuda", "cpu") if te_device.ALLOW_CPU else ("cuda",)
    raise AttributeError(name)
