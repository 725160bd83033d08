"""What an experts module is, and finding them in a model.

Transformers marks its routed experts with the decorator `use_experts_implementation`: the module then states its layout
in attributes (`has_gate`, `is_transposed`, `is_concatenated`, `has_bias`, `has_post_expert_norm`) and its gating in
`_apply_gate`. We read those and never a name, so a new family works without a line here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from expertmesh.errors import ModelError

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


@dataclass(frozen=True)
class ExpertsSpec:
    """The layout of one experts module. `E` experts, `H` hidden, `I` intermediate; the up projection has
    `U = 2 I` outputs when it holds gate and up together, `I` otherwise.

    Attributes:
        num_experts: `E`, over all ranks.
        has_gate: the up projection is `gate_up_proj` and `_apply_gate` follows it; otherwise `up_proj` and `act_fn`.
        has_bias: `[E, U]` and `[E, H]` biases named `*_proj_bias` exist.
        is_transposed: weights are `[E, H, U]` and `[E, I, H]`; otherwise `[E, U, H]` and `[E, H, I]`.
        is_concatenated: gate and up rows lie one block after the other; otherwise they alternate.
        has_post_expert_norm: `post_expert_norm` is applied to each expert's output before the routing weight.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    has_post_expert_norm: bool

    @property
    def up_name(self) -> str:
        """The attribute that holds the up (or fused gate and up) projection."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameters with one slice an expert on dim 0: those that expert parallelism shards."""
        weights = (self.up_name, "down_proj")
        return weights + tuple(f"{name}_bias" for name in weights) if self.has_bias else weights

    @classmethod
    def of(cls, experts: nn.Module) -> ExpertsSpec:
        """Read the layout off a module that `is_experts` recognises.

        Raises:
            ModelError: a parameter that the layout promises is missing, or has another number of experts.
        """
        flags = {name: bool(getattr(experts, name)) for name in _LAYOUT}
        spec = cls(num_experts=experts.down_proj.shape[0], **flags)
        for name in spec.parameter_names:
            parameter = getattr(experts, name, None)
            if not isinstance(parameter, nn.Parameter) or parameter.shape[0] != spec.num_experts:
                found = "missing" if parameter is None else f"of shape {tuple(parameter.shape)}"
                raise ModelError(
                    f"{type(experts).__name__}.{name} is {found}, but its layout promises {spec.num_experts} experts "
                    f"on dim 0: this module cannot be sharded by expert."
                )
        return spec


def is_experts(module: nn.Module) -> bool:
    """Whether a module follows Transformers' contract for routed experts."""
    down_proj = getattr(module, "down_proj", None)
    return (
        all(hasattr(module, name) for name in _LAYOUT)
        and callable(getattr(module, "_apply_gate", None))
        and isinstance(down_proj, torch.Tensor)
        and down_proj.ndim == 3
    )


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """All experts modules of a model by their qualified name, in forward order of registration.

    Raises:
        ModelError: there are none.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no routed experts that expert parallelism could spread (no module follows "
            f"Transformers' `use_experts_implementation` contract): use a mixture-of-experts model, or remove the "
            f"`parallelism_config_ep_*` keys to train it with plain FSDP2."
        )
    return found


def check_divisible(experts: dict[str, nn.Module], ep_size: int) -> None:
    """Refuse a number of experts that `ep_size` does not divide.

    Raises:
        ModelError: names the module and the sizes that would work.
    """
    for name, module in experts.items():
        num_experts = ExpertsSpec.of(module).num_experts
        if num_experts % ep_size:
            fitting = ", ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
            raise ModelError(
                f"`{name}` has {num_experts} experts, which ep_size {ep_size} does not divide: "
                f"set ep_size to one of {fitting}."
            )
