"""Activation checkpointing that is turned on after a model was given expert parallelism, ours or Transformers' own.

Monkey-patch, checked on transformers 5.24.0 and covered by tests/test_recompute.py:

- `transformers.PreTrainedModel._set_gradient_checkpointing`, behind `activation_checkpointing_enable` and its older
  name: blocks with experts keep their routing, see `expertmesh.recompute`.

Models whose tokens are not sent by one of our dispatchers go the original way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expertmesh_plugins.patching import divert
from expertmesh_plugins.transformers.ep_implementation import is_served
from transformers import PreTrainedModel

from expertmesh.expert_parallel import is_expert_parallel
from expertmesh.recompute import keep_routing


def patch_checkpointing() -> None:
    """Apply the patch, if it is not there yet."""
    divert(PreTrainedModel, "_set_gradient_checkpointing", _set_and_keep_routing, _sends_tokens)


def _sends_tokens(model: PreTrainedModel) -> bool:
    return is_expert_parallel(model) or is_served(model)


def _set_and_keep_routing(original: Callable[..., None], model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    keep_routing(model)
