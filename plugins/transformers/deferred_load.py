"""`from_pretrained` that leaves the weights in their files, for launched jobs with expert parallelism.

Monkey-patch, checked on transformers 5.24.0: `transformers.modeling_utils.PreTrainedModel._load_pretrained_model`, the
step of `from_pretrained` that reads weights; see `traced_load` for what happens there instead.

A load that is not an ordinary one (quantised, onto devices, from other files than safetensors, of a model without
routed experts, ...) goes the original way; so does every load with `EXPERTMESH_DEFERRED_LOAD=0`.

Nothing of ours is imported before the first load: the patch is applied while Transformers, or something of ours that
needs Transformers, is still being imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def install(modeling_utils: ModuleType) -> None:
    """Apply the patch to `transformers.modeling_utils`; idempotent."""
    original = modeling_utils.PreTrainedModel._load_pretrained_model
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load(
        model: Any,
        state_dict: Mapping[str, Any] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        loaded = None
        if _wanted() and state_dict is None and checkpoint_files and not (args or kwargs):
            from expertmesh_plugins.transformers.traced_load import load_deferred

            loaded = load_deferred(original, model, checkpoint_files, load_config)
        return loaded or original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(load)


def _wanted() -> bool:
    return (
        "PARALLELISM_CONFIG_EP_SIZE" in os.environ
        and int(os.environ.get("WORLD_SIZE", "1")) > 1
        and os.environ.get("EXPERTMESH_DEFERRED_LOAD") != "0"
    )
