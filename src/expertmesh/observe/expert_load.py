"""How evenly the router spreads its tokens over the experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.adapters import find_adapters
from expertmesh.experts import ExpertsSpec, is_experts


class ExpertLoad:
    """Counts the tokens routed to each expert of each layer, with or without expert parallelism.

    Counts what the forward passes of this rank in training mode route; recomputed forwards count again, which leaves
    ratios as they are.

    Args:
        model: any model; experts modules are found as everywhere else. Attach before or after it is parallelized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: list[Tensor] = []
        adapters = find_adapters(model)
        for name, module in model.named_modules():
            if is_experts(module):
                self._attach(module, adapters[name].module if name in adapters else module)

    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean expert's, averaged over layers; 1 is perfect balance.

        Collective over all ranks. Starts counting anew. `nan` without experts, or if nothing was routed.
        """
        if not self._counts:
            return float("nan")
        counts = torch.stack([count.double() for count in self._counts])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(counts)
        for count in self._counts:
            count.zero_()
        return (counts.amax(1) / counts.mean(1)).mean().item()

    def _attach(self, experts: nn.Module, called: nn.Module) -> None:
        num_experts = ExpertsSpec.of(experts).num_experts
        count = torch.zeros(num_experts, dtype=torch.int64, device=experts.down_proj.device)
        position = len(self._counts)
        self._counts.append(count)

        def add(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module.training:
                total = self._counts[position] = self._counts[position].to(args[1].device)
                total += torch.bincount(args[1].reshape(-1), minlength=num_experts)

        called.register_forward_pre_hook(add)
