"""What balancing routers has to know about Transformers' models and its Trainer.

Monkey-patches, checked on transformers 5.24.0, with tests in tests/test_balance.py:

- `load_balancing_loss_func` of the modeling modules that a balanced model comes from, and of Mixtral's. While such a
  model runs its forward, the loss is taken over the tokens of all ranks; everybody else gets the original.
- `transformers.Trainer.compute_loss` and `transformers.Trainer.training_step`: say what becomes of the loss, for the
  terms that are added to it. They compute what they did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from expertmesh_plugins.patching import divert
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

from expertmesh.balance.loss_use import loss_use, loss_used
from expertmesh.errors import ModelError

Loss = Callable[..., Tensor | int]

_FUNCTION = "load_balancing_loss_func"

# TRL's trainers take the loss of every family from here.
_SHARED = "transformers.models.mixtral.modeling_mixtral"

# How many balanced models' forwards enclose the code that is running.
_depth: ContextVar[int] = ContextVar("expertmesh_balanced_forwards", default=0)


def replace_balancing_loss(model: nn.Module, ours: Loss, computes_the_same: Callable[[Loss], bool]) -> None:
    """Take load-balancing losses by `ours` while the model runs its forward.

    Args:
        model: in whole, as it will be called.
        ours: computes the loss from the same arguments.
        computes_the_same: whether `ours` is made for such a function.

    Raises:
        ModelError: the model will return a loss of another kind.
    """
    for module in _modeling_modules(model):
        original = getattr(module, _FUNCTION)
        if hasattr(original, "__wrapped__"):
            continue
        if computes_the_same(original):
            setattr(module, _FUNCTION, _ours_inside(original, ours))
        elif _returns_balancing_loss(model):
            raise ModelError(
                f"the load-balancing loss of {type(model).__name__} is of a kind that cannot be taken over all ranks: "
                f"set ep_balance_aux_loss to local, or the model's `output_router_logits` to False."
            )
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    modules = [
        import_module(_SHARED),
        *(sys.modules[name] for name in sorted(names - {_SHARED}) if name in sys.modules),
    ]
    return [module for module in modules if hasattr(module, _FUNCTION)]


def _ours_inside(original: Loss, ours: Loss) -> Loss:
    @functools.wraps(original)
    def balancing_loss(*args: Any, **kwargs: Any) -> Tensor | int:
        return (ours if _depth.get() else original)(*args, **kwargs)

    return balancing_loss


def _returns_balancing_loss(model: nn.Module) -> bool:
    return any(getattr(part.config.get_text_config(), "output_router_logits", False) for part in _pretrained(model))


def _enter(model: nn.Module, args: tuple[Any, ...]) -> None:
    _depth.set(_depth.get() + 1)


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    _depth.set(_depth.get() - 1)
    multiplied = loss_use().multiplied
    if multiplied == 1 or not isinstance(getattr(output, "aux_loss", None), Tensor):
        return None
    # It was divided for the sum that is the model's loss; who reads it alone wants it whole.
    output["aux_loss"] = output.aux_loss * multiplied
    return output


def router_logits(model: nn.Module) -> dict[nn.Module, int]:
    """Where Transformers records router logits: the routers, and the position of the logits in what they return."""
    return {
        module: recorder.index
        for part in _pretrained(model)
        for recorder in _recorders(part)
        for name, module in part.named_modules()
        if isinstance(module, recorder.target_class) and f".{recorder.layer_name or ''}" in f".{name}"
    }


def _recorders(model: PreTrainedModel) -> list[OutputRecorder]:
    recorders = _CAN_RECORD_REGISTRY.get(model).get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    return [recorder for recorder in recorders if getattr(recorder, "target_class", None) is not None]


def _pretrained(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def patch_trainer() -> None:
    """Apply the patches of Trainer, if they are not there yet."""
    divert(Trainer, "compute_loss", _compute_loss, _is_ours)
    divert(Trainer, "training_step", _training_step, _is_ours)


def _is_ours(trainer: Trainer) -> bool:
    return hasattr(trainer.accelerator.parallelism_config, "expert_parallel")


def _compute_loss(
    original: Callable[..., Any],
    trainer: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> Any:
    by_items = num_items_in_batch is not None and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)
    shares = by_items and trainer.args.average_tokens_across_devices
    with loss_used(multiplied=trainer.accelerator.num_processes if shares else 1):
        return original(trainer, model, inputs, return_outputs, num_items_in_batch)


def _training_step(
    original: Callable[..., Tensor],
    trainer: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    num_items_in_batch: torch.Tensor | int | None = None,
) -> Tensor:
    with loss_used(micro_batches=trainer.current_gradient_accumulation_steps):
        return original(trainer, model, inputs, num_items_in_batch)
