"""Low-rank adapters of expert weights, as the core sees them; whoever injects adapters (PEFT) describes them so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from expertmesh.compute.projection import LowRank
from expertmesh.plugins import load_plugin


@dataclass(frozen=True)
class AdapterParameter:
    """A parameter that holds something for every expert.

    Attributes:
        owner: the module that has it.
        name: its attribute there.
        by_expert: from its layout to one with the experts outermost: dim 0 is a multiple of the number of experts.
        back: from there to its layout.
    """

    owner: nn.Module
    name: str
    by_expert: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


class ExpertAdapters(Protocol):
    """The adapters around one experts module.

    Attributes:
        module: the outermost wrapper, which the model calls in place of the experts.
        parameters: of all adapters, active or not.
    """

    module: nn.Module
    parameters: Iterable[AdapterParameter]

    def active(self) -> Mapping[str, LowRank]:
        """What to add right now, by the name of the adapted weight; local tensors, gathered where FSDP2 shards them.

        Raises:
            ModelError: several adapters are active at once.
        """


def find_adapters(model: nn.Module) -> Mapping[str, ExpertAdapters]:
    """The adapters around a model's experts, by the experts' qualified name; none where PEFT has not been.

    Raises:
        ModelError: an adapter that cannot be computed with expert parallelism.
        ConfigError: the plugin that knows PEFT is not installed.
    """
    return load_plugin("peft").adapted_experts(model) if hasattr(model, "peft_config") else {}
