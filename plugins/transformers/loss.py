"""Loss without logits for Transformers' language models.

Not the library but each model is changed, as it is given expert parallelism: in training and with labels its output
embedding returns logits that are not made yet, and `model.loss_function`, which Transformers lets everybody set, takes
its loss from what they would be made of.

Monkey-patch, checked on transformers 5.24.0 and covered by tests/test_loss.py:

- `transformers.Trainer.compute_loss`: with `label_smoothing_factor`, Trainer smooths outside of the model, from logits.
  The loss function of a model that was changed here smooths itself, by the same formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from expertmesh_plugins.patching import divert
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from expertmesh.loss.pending import Head, PendingLogits

LinearCrossEntropy = Callable[..., Tensor]

# What Trainer would smooth labels by.
_smoothing: ContextVar[float] = ContextVar("expertmesh_label_smoothing", default=0.0)


@dataclass
class LossWithoutLogits:
    """What stands in a model's place for its head and its loss function.

    Attributes:
        model: the language model.
        root: the outermost module, as it is called.
        head: its output embedding.
        compute: sums up the losses of tokens, see `expertmesh.loss.linear_cross_entropy`.
        is_asked_for: whether a forward is running whose loss will be taken from the logits at once.
    """

    model: PreTrainedModel
    root: nn.Module
    head: nn.Linear
    compute: LinearCrossEntropy
    is_asked_for: bool = False

    def install(self) -> None:
        """Change the model."""
        # PEFT calls the forward of the model inside past its hooks.
        for called in {self.root, self.model}:
            called.register_forward_pre_hook(self._enter, with_kwargs=True)
            called.register_forward_hook(self._leave, always_call=True)
        self.head.forward = self._logits
        self.model.loss_function = self._loss

    @torch.compiler.disable
    def _enter(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(type(called).forward).bind_partial(called, *args, **kwargs).arguments
        labels = given.get("labels", given.get("kwargs", {}).get("labels"))
        self.is_asked_for = labels is not None and self.model.training and torch.is_grad_enabled()

    def _leave(self, *_: Any) -> None:
        self.is_asked_for = False

    # A compiler would have to know what these logits are.
    @torch.compiler.disable
    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.head.weight
        if not self.is_asked_for or isinstance(weight, DTensor):
            return type(self.head).forward(self.head, hidden)
        dtype = torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else hidden.dtype
        hidden = hidden.to(dtype)
        return PendingLogits.of(Head(hidden, weight, self.head.bias, self._gather), dtype)

    @torch.compiler.disable
    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `ForCausalLMLoss`."""
        if not isinstance(logits, PendingLogits) or logits.shape[-1] != vocab_size:
            return self._loss_of_logits(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head = logits.head
        targets = shift_labels.reshape(-1).to(head.hidden.device)
        with torch.autocast(head.hidden.device.type, enabled=False):
            total = self.compute(
                head.hidden.flatten(0, -2),
                head.weight.to(head.hidden.dtype),
                None if head.bias is None else head.bias.to(head.hidden.dtype),
                targets,
                ignore_index=ignore_index,
                label_smoothing=_smoothing.get(),
            )
        return total / _denominator(num_items_in_batch, targets, ignore_index)

    def _loss_of_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None,
        ignore_index: int,
        shift_labels: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """The library's, with the smoothing that Trainer leaves to us."""
        smoothing = _smoothing.get()
        if not smoothing:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        total = nn.functional.cross_entropy(
            logits.float().view(-1, vocab_size),
            targets,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=smoothing,
        )
        return total / _denominator(num_items_in_batch, targets, ignore_index)

    def _gather(self) -> None:
        """Bring back a weight that FSDP2 freed at the end of the forward. Collective then."""
        if self.head.weight.untyped_storage().size() == 0 or isinstance(self.head.weight, DTensor):
            self.root.unshard()


def take_loss_without_logits(model: nn.Module, compute: LinearCrossEntropy) -> list[str]:
    """Let the language models in a model take their loss from hidden states.

    Left alone are models with another loss function than `ForCausalLMLoss`, and those whose head is not plainly
    `nn.Linear`: one with an adapter, a copy that is trained beside it, or a unit of FSDP2 of its own.

    Args:
        model: the whole model, as it is called.
        compute: see `expertmesh.loss.linear_cross_entropy`.

    Returns:
        The names of those that were changed.
    """
    changed = []
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and _suits(part):
            LossWithoutLogits(part, model, part.get_output_embeddings(), compute).install()
            changed.append(name)
    return changed


def _suits(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return (
        type(head) is nn.Linear
        and "forward" not in head.__dict__
        and not isinstance(head, FSDPModule)
        and model.loss_function is ForCausalLMLoss
    )


def _denominator(num_items_in_batch: Tensor | int | None, targets: Tensor, ignore_index: int) -> Tensor | int:
    if num_items_in_batch is None:
        return (targets != ignore_index).sum()
    return num_items_in_batch.to(targets.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch


def _is_autocast(hidden: Tensor) -> bool:
    return torch.is_autocast_enabled(hidden.device.type)


def patch_trainer() -> None:
    """Apply the patch, if it is not there yet."""
    divert(Trainer, "compute_loss", _smooth_inside, _smooths_in_vain)


def _smooths_in_vain(trainer: Trainer) -> bool:
    """Whether Trainer would take logits for what the model's loss function can do."""
    if trainer.label_smoother is None or trainer.compute_loss_func is not None or not trainer.model.training:
        return False
    changed = [
        loss.__self__.model
        for part in trainer.model.modules()
        if isinstance(loss := getattr(part, "_loss_function", None), MethodType)
        and isinstance(loss.__self__, LossWithoutLogits)
    ]
    # A loss that the model adds would count, which it does not where Trainer smooths by itself.
    return bool(changed) and not any(
        getattr(model.config.get_text_config(), "output_router_logits", False) for model in changed
    )


def _smooth_inside(original: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    with _smoothed_by(trainer):
        return original(trainer, *args, **kwargs)


@contextmanager
def _smoothed_by(trainer: Trainer) -> Any:
    smoother, trainer.label_smoother = trainer.label_smoother, None
    token = _smoothing.set(smoother.epsilon)
    try:
        yield
    finally:
        _smoothing.reset(token)
        trainer.label_smoother = smoother
