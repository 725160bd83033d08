"""`mixed_precision: fp8`, taken over from Accelerate, which would convert layers itself.

Its conversion makes copies of `nn.Linear` and `nn.LayerNorm`, the head among them, stops in a module at the first layer
whose sizes do not fit, adds keys to state dicts, and knows `DelayedScaling`, whose state no checkpoint here has. With
expert parallelism `ep_layers` says which layers multiply in 8 bits, and `ep_fp8_recipe` how; all the rest of the
precision is Accelerate's, which is that of bf16. Checked on accelerate 1.15.0; tests in tests/test_te_accelerate.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.layers import OWN

if TYPE_CHECKING:
    from accelerate import Accelerator

_HANDLERS = ("fp8_recipe_handler", "te_recipe_handler", "ao_recipe_handler", "msamp_recipe_handler")


def take_over_fp8(accelerator: Accelerator, config: ExpertParallelConfig) -> None:
    """Keep Accelerate from looking for a backend of its own, after its state exists and before it looks.

    Raises:
        ConfigError: a backend or a recipe of Accelerate's was asked for, or nothing that multiplies in 8 bits.
    """
    if accelerator.mixed_precision != "fp8":
        return
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO")
    if backend.upper() != "NO" or any(getattr(accelerator, name, None) is not None for name in _HANDLERS):
        raise ConfigError(
            "fp8 with expert parallelism has no use for Accelerate's backends and recipes: remove `fp8_config` from "
            "the launch configuration, and FP8 recipes from `kwargs_handlers`; `ep_layers: te` and `ep_fp8_recipe` say "
            "how layers multiply."
        )
    if config.ep_layers in OWN:
        raise ConfigError(
            f"mixed_precision fp8 needs layers that multiply in 8 bits, and ep_layers is {config.ep_layers}: set "
            f"ep_layers to te, or mixed_precision to bf16."
        )
    # It then believes that a recipe was given, and, finding none, converts nothing.
    accelerator.has_fp8_handler = True
