"""What Accelerate does otherwise where an accelerator's `parallelism_config` is an `ExpertMeshConfig`.

Monkey-patches, checked on accelerate 1.15.0, with tests in tests/test_checkpoint_accelerate.py and
tests/test_deferred_load.py:

- `accelerate.Accelerator.save_state`, `accelerate.Accelerator.load_state`: checkpoints that are Hugging Face models and
  that any mesh can resume, see `checkpoints`.
- `accelerate.Accelerator.get_state_dict`: adapters of experts as PEFT stores them (tests/test_peft.py).
- `accelerate.Accelerator.end_training`: first waits for a checkpoint that is written in the background, and for the
  other ranks, and ends what engines hold (tests/test_engines.py).
- `accelerate.Accelerator.prepare`: first gives models with routed experts what balances them, and language models their
  loss without logits (tests/test_loss.py), in one process too; there, where nothing is sharded, also their layers
  (tests/test_te_accelerate.py).
- `accelerate.Accelerator.backward`: first adds the z-loss to the loss (both: tests/test_balance.py).
- `accelerate.accelerator.fsdp2_prepare_model`: a model whose weights were left in their files gets them once
  sharded, and trainable weights that ranks drew become equal on all replicas (tests/test_peft_traps.py).

Accelerators without such a configuration go the original way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate import accelerator as accelerator_module
from expertmesh_plugins.accelerate.checkpoints import get_state_dict, load_state, save_state
from expertmesh_plugins.accelerate.fsdp import ExpertMeshFSDPPlugin
from expertmesh_plugins.patching import divert
from torch import Tensor, nn

from expertmesh.balance import balance, join_waiting
from expertmesh.checkpoint.checkpoint import wait_for_checkpoints
from expertmesh.dispatch import close_engines
from expertmesh.layers import replace_layers
from expertmesh.loss import take_loss_without_logits


def patch_accelerate() -> None:
    """Apply the patches, if they are not there yet."""
    divert(Accelerator, "save_state", save_state, _is_ours)
    divert(Accelerator, "load_state", load_state, _is_ours)
    divert(Accelerator, "get_state_dict", get_state_dict, _is_ours)
    divert(Accelerator, "end_training", _end_training, _is_ours)
    divert(Accelerator, "prepare", _balance_and_prepare, _is_ours)
    divert(Accelerator, "backward", _join_and_backward, _is_ours)
    if not hasattr(accelerator_module.fsdp2_prepare_model, "__wrapped__"):
        accelerator_module.fsdp2_prepare_model = _then_fill(accelerator_module.fsdp2_prepare_model)


def _is_ours(accelerator: Accelerator) -> bool:
    return hasattr(accelerator.parallelism_config, "expert_parallel")


def _end_training(original: Callable[[Accelerator], None], accelerator: Accelerator) -> None:
    wait_for_checkpoints()
    # A rank must not exit right behind a collective: gloo's threads may still hold its tensors (pytorch#179291).
    accelerator.wait_for_everyone()
    close_engines()
    original(accelerator)


def _balance_and_prepare(original: Callable[..., Any], accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
    for model in objects:
        if isinstance(model, nn.Module):
            config = accelerator.parallelism_config.expert_parallel
            balance(model, config, z_loss_to_returned=False)
            take_loss_without_logits(model, config, accelerator.device)
            if accelerator.num_processes == 1:
                replace_layers(model, config, accelerator.device, fp8=accelerator.mixed_precision == "fp8")
    return original(accelerator, *objects, **options)


def _join_and_backward(original: Callable[..., None], accelerator: Accelerator, loss: Tensor, **options: Any) -> None:
    original(accelerator, join_waiting(loss), **options)


def _then_fill(prepare: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(prepare)
    def prepare_and_fill(accelerator: Accelerator, model: nn.Module) -> Any:
        prepared = prepare(accelerator, model)
        plugin = accelerator.state.fsdp_plugin
        if isinstance(plugin, ExpertMeshFSDPPlugin):
            plugin.fill_weights(prepared)
        return prepared

    return prepare_and_fill
