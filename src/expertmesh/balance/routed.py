"""Watching where tokens are routed: the calls of a model's experts modules, and counters for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.adapters import find_adapters
from expertmesh.experts import ExpertsSpec, is_experts


def is_recomputation() -> bool:
    """Whether a forward runs inside a backward pass, as only those of activation checkpointing do."""
    return torch._C._current_graph_task_id() != -1


def called_experts(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """What the model calls in place of each experts module, and its number of experts, by the experts' name.

    That is the module itself, or the outermost adapter around it. Empty for a dense model.
    """
    adapters = find_adapters(model)
    return {
        name: (adapters[name].module if name in adapters else module, ExpertsSpec.of(module).num_experts)
        for name, module in model.named_modules()
        if is_experts(module)
    }


def before_training_call(called: nn.Module, watch: Callable[[Tensor], None]) -> None:
    """Call `watch(top_k_index [tokens, top_k])` before each forward in training mode, but not before recomputations."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and not is_recomputation():
            watch(args[1])

    called.register_forward_pre_hook(hook)


class RoutedTokens:
    """Counts the tokens routed to each of several places, on the device and without reading anything back.

    Every token counts that the experts are given, padding included, because that is what they compute.
    """

    def __init__(self, num_places: int) -> None:
        self._counts = torch.zeros(num_places, dtype=torch.int64)

    def add(self, places: Tensor) -> None:
        """Count `[tokens, top_k]` choices."""
        chosen = places.reshape(-1).long()
        self._on(chosen.device).scatter_add_(0, chosen, torch.ones_like(chosen))

    def add_once(self, places: Tensor) -> None:
        """Count `[tokens, top_k]` choices, equal ones of a token once."""
        reached = torch.zeros(len(places), len(self._counts), dtype=torch.int64, device=places.device)
        self._on(places.device).add_(reached.scatter_(1, places.long(), 1).sum(0))

    def take(self) -> Tensor:
        """The counts of this rank, `[num_places]` int64, which start anew."""
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        return counts

    def _on(self, device: torch.device) -> Tensor:
        self._counts = self._counts.to(device)
        return self._counts
