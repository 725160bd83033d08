"""Balance without a loss: experts that got too many tokens are made less attractive after each optimizer step.

Routers of this kind choose by `score + bias` and weight by `score` alone, so the bias takes part in no gradient. After
a step that saw `load_e` tokens for expert `e`, it moves by `rate * sign(mean load - load_e)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from expertmesh.balance.routed import RoutedTokens, before_training_call, called_experts
from expertmesh.errors import ModelError
from expertmesh.ranks import num_ranks

# What Transformers' routers call it. Some keep it as a buffer, some as a parameter without gradient.
_NAMES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class _Layer:
    owner: nn.Module
    name: str
    routed: RoutedTokens

    def move(self, delta: Tensor) -> None:
        """Add `[num_experts]` to the bias."""
        bias = getattr(self.owner, self.name)
        delta = delta.view(bias.shape)
        if isinstance(bias, DTensor):
            whole = [Replicate()] * bias.device_mesh.ndim
            delta = DTensor.from_local(delta, bias.device_mesh, whole, run_check=False).redistribute(
                placements=bias.placements
            )
        elif not isinstance(bias, nn.Parameter) and bias.dtype != torch.float32:
            # Many steps of the usual size are lost where a bias near 1 is kept in bfloat16.
            bias = bias.float()
            setattr(self.owner, self.name, bias)
        with torch.no_grad():
            bias.add_(delta)


class BiasUpdate:
    """Moves the correction biases of a model after each step of its optimizer, equally on all ranks.

    The load is that of all tokens since the last step: of all ranks and all micro-batches, in training mode, without
    recomputations.

    Args:
        model: before or after it is sharded. It keeps this object alive.
        rate: what a bias moves by.

    Raises:
        ModelError: no router has such a bias, or the base of adapters would change with it.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        if hasattr(model, "peft_config"):
            raise ModelError(
                "ep_balance_bias_rate would change the routers of the base model, which are not saved with its "
                "adapters: set it to 0 to train adapters."
            )
        self._model = model
        self._rate = rate
        self._layers: list[_Layer] = []
        self._counted = False
        for called, owner, name, num_experts in _biases(model):
            layer = _Layer(owner, name, RoutedTokens(num_experts))
            self._layers.append(layer)
            before_training_call(called, self._watch(layer))
        if not self._layers:
            raise ModelError(
                f"ep_balance_bias_rate is set, but no router of {type(model).__name__} has a correction bias "
                f"({' or '.join(f'`{name}`' for name in _NAMES)}): set it to 0 and use the model's own load-balancing "
                f"loss (`output_router_logits=True`), or train a model that has one, such as DeepSeek-V3 or GLM-4.5."
            )
        _after_any_step(self)

    def _watch(self, layer: _Layer) -> Callable[[Tensor], None]:
        def watch(top_k_index: Tensor) -> None:
            self._counted = True
            layer.routed.add(top_k_index)

        return watch

    def after_step(self, optimizer: Optimizer) -> None:
        """Update, if it was this model's optimizer that made a step. Collective then."""
        if self._counted and self._is_trained_by(optimizer):
            self._counted = False
            self._update()

    def _is_trained_by(self, optimizer: Optimizer) -> bool:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in trained for parameter in self._model.parameters())

    def _update(self) -> None:
        counts = [layer.routed.take() for layer in self._layers]
        total = torch.cat(counts)
        if num_ranks() > 1:
            dist.all_reduce(total)
        for layer, load in zip(self._layers, total.split([len(count) for count in counts]), strict=True):
            # In whole numbers, so that an expert with just the mean stays where it is.
            layer.move(self._rate * torch.sign(load.sum() - load * len(load)).float())


def _after_any_step(update: BiasUpdate) -> None:
    """Tell it about the steps of all optimizers, made before or after, for as long as it lives."""
    alive = weakref.ref(update)

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener = alive()
        if listener is not None:
            listener.after_step(optimizer)

    handle = register_optimizer_step_post_hook(hook)
    weakref.finalize(update, handle.remove).atexit = False


def _biases(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, str, int]]:
    """For each layer with a correction bias what is called, what has the bias, its name, and the number of experts."""
    experts = called_experts(model)
    for name, (called, num_experts) in experts.items():
        found = _nearest_bias(model, name, num_experts, experts)
        if found is not None:
            yield called, *found, num_experts


def _nearest_bias(
    model: nn.Module, experts: str, num_experts: int, all_experts: dict[str, Any]
) -> tuple[nn.Module, str] | None:
    """The bias in the smallest module around the experts that has one, and holds no other experts."""
    block = experts
    while block:
        block = block.rpartition(".")[0]
        if sum(name.startswith(f"{block}." if block else "") for name in all_experts) > 1:
            return None
        for owner in model.get_submodule(block).modules():
            for name in _NAMES:
                bias = getattr(owner, name, None)
                if isinstance(bias, Tensor) and bias.numel() == num_experts:
                    return owner, name
    return None
