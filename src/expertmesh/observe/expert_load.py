"""How evenly the router spreads its tokens over the experts, and over the ranks that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.balance.routed import RoutedTokens, before_training_call, called_experts
from expertmesh.errors import ModelError
from expertmesh.ranks import num_ranks


@dataclass(frozen=True)
class LayerLoad:
    """What one layer's experts were given, by all ranks.

    Attributes:
        experts: `[num_experts]` int64, tokens routed to each expert: a token counts once for each of its experts.
        ranks: `[ep_size]` int64, tokens that each rank of an EP group was sent, its own among them: a token counts
            once for each rank that holds one of its experts, as it travels.
    """

    experts: Tensor
    ranks: Tensor

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean expert's; `nan` if nothing was routed."""
        counts = self.experts.double()
        return (counts.max() / counts.mean()).item()


class ExpertLoad:
    """Counts the tokens routed to each expert and to each rank, in each layer, with or without expert parallelism.

    Counts what this rank's forward passes in training mode route, once each: what activation checkpointing recomputes
    is not counted again. Counting happens on the device and waits for nothing; reading does.

    Args:
        model: any model; experts modules are found as everywhere else. Attach before or after it is parallelized.
        ep_size: ranks that share a layer's experts.

    Raises:
        ModelError: `ep_size` does not divide a layer's number of experts.
    """

    def __init__(self, model: nn.Module, ep_size: int = 1) -> None:
        self._layers: dict[str, tuple[RoutedTokens, RoutedTokens]] = {}
        for name, (called, num_experts) in called_experts(model).items():
            if num_experts % ep_size:
                raise ModelError(
                    f"`{name}` has {num_experts} experts, which ep_size {ep_size} does not divide: give the ep_size "
                    f"that the model is trained with."
                )
            self._attach(name, called, num_experts, ep_size)

    def read(self) -> dict[str, LayerLoad]:
        """Each layer's load since the last reading, on the CPU, by the name of its experts. Collective over all ranks.

        Starts counting anew. Empty without experts.
        """
        if not self._layers:
            return {}
        counts = [counter.take() for counters in self._layers.values() for counter in counters]
        total = torch.cat(counts)
        if num_ranks() > 1:
            dist.all_reduce(total)
        parts = iter(total.cpu().split([len(count) for count in counts]))
        return {name: LayerLoad(experts=next(parts), ranks=next(parts)) for name in self._layers}

    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean expert's, averaged over layers; 1 is perfect balance.

        Collective over all ranks. Starts counting anew. `nan` without experts, or if nothing was routed.
        """
        loads = self.read().values()
        return sum(load.imbalance for load in loads) / len(loads) if loads else float("nan")

    def _attach(self, name: str, called: nn.Module, num_experts: int, ep_size: int) -> None:
        experts, ranks = self._layers[name] = RoutedTokens(num_experts), RoutedTokens(ep_size)
        per_rank = num_experts // ep_size

        def count(top_k_index: Tensor) -> None:
            experts.add(top_k_index)
            ranks.add_once(top_k_index // per_rank)

        before_training_call(called, count)
