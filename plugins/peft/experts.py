"""PEFT's `target_parameters` on expert weights: finding them, and what they add to the experts' computation.

PEFT wraps an experts module in one `ParamWrapper` for each adapted weight, one around the other. Each holds, for all
experts together, `lora_A [E * r, in]` with the experts outermost and `lora_B [out, r * E]` with the experts innermost.
PEFT itself adds `scaling * B_e A_e` to the whole stack of weights at every forward; here both stay thin (`LowRank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.adapters import AdapterParameter
from expertmesh.compute.projection import LowRank
from expertmesh.errors import ModelError
from expertmesh.experts import ExpertsSpec, is_experts


def b_by_expert(b: Tensor, num_experts: int) -> Tensor:
    """PEFT's `lora_B`, `[out, r * E]`, as `[E, out, r]`."""
    return b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)


def b_as_stored(b: Tensor) -> Tensor:
    """`[E, out, r]` as PEFT's `lora_B`, `[out, r * E]`."""
    return b.permute(1, 2, 0).reshape(b.shape[1], -1)


def as_stored(name: str, whole: Tensor) -> Tensor:
    """A whole adapter tensor in PEFT's layout, from the one that a sharded model keeps it in."""
    return b_as_stored(whole) if _is_expert_b(name, whole) else whole


def stored_shape(name: str, parameter: Tensor) -> tuple[int, ...]:
    """The shape that a model's adapter tensor has in PEFT's file."""
    if not _is_expert_b(name, parameter):
        return tuple(parameter.shape)
    num_experts, out, rank = parameter.shape
    return (out, rank * num_experts)


def by_expert(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of PEFT's file in the layout that the model keeps `parameter` in."""
    return b_by_expert(whole, parameter.shape[0]) if _is_expert_b(name, parameter) else whole


def _is_expert_b(name: str, tensor: Tensor) -> bool:
    # PEFT's own `lora_B`s are matrices.
    return ".lora_B." in name and tensor.ndim == 3


def a_by_expert(a: Tensor, num_experts: int) -> Tensor:
    """PEFT's `lora_A`, `[E * r, in]`, as `[E, r, in]`."""
    return a.reshape(num_experts, -1, a.shape[1])


@dataclass(frozen=True)
class AdaptedExperts:
    """An experts module inside its `ParamWrapper`s, outermost first. See `expertmesh.adapters.ExpertAdapters`."""

    wrappers: tuple[ParamWrapper, ...]

    @property
    def module(self) -> nn.Module:
        """The outermost wrapper."""
        return self.wrappers[0]

    @property
    def parameters(self) -> Iterator[AdapterParameter]:
        """`lora_A` stays as PEFT has it, whose rows are in the order of the experts; `lora_B` becomes `[E, out, r]`."""
        for wrapper in self.wrappers:
            for linear in wrapper.lora_A.values():
                yield AdapterParameter(linear, "weight", _same, _same)
            for linear in wrapper.lora_B.values():
                yield AdapterParameter(
                    linear, "weight", partial(b_by_expert, num_experts=wrapper.num_experts), b_as_stored
                )

    def active(self) -> Mapping[str, LowRank]:
        """See `ExpertAdapters.active`."""
        found = {wrapper.parameter_name: self._active(wrapper) for wrapper in self.wrappers}
        return {name: adapter for name, adapter in found.items() if adapter is not None}

    def _active(self, wrapper: ParamWrapper) -> LowRank | None:
        if wrapper.disable_adapters or wrapper.merged:
            return None
        names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if len(names) > 1:
            raise ModelError(
                f"the adapters {', '.join(names)} are active at once on expert weights, and expert parallelism "
                f"computes one: call set_adapter with one of them."
            )
        if not names:
            return None
        (name,) = names
        a, b = _local(wrapper.lora_A[name].weight), _local(wrapper.lora_B[name].weight)
        return LowRank(a_by_expert(a, b.shape[0]), b, wrapper.scaling[name])


def adapted_experts(model: nn.Module) -> dict[str, AdaptedExperts]:
    """The adapters of every experts module that has some, by the experts' qualified name.

    Raises:
        ModelError: an adapter on a parameter of experts that is not one of their two projections, or a target parameter
            that the model does not have.
    """
    wrappers: dict[nn.Module, list[tuple[str, ParamWrapper]]] = {}
    adapted = set()
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            adapted.add(f"{name.replace('.base_layer', '')}.{module.parameter_name}")
            if is_experts(module.get_base_layer()):
                wrappers.setdefault(module.get_base_layer(), []).append((name, module))
    _refuse_unmatched(model, adapted)
    return {f"{found[-1][0]}.base_layer": _checked(experts, found) for experts, found in wrappers.items()}


def _refuse_unmatched(model: nn.Module, adapted: set[str]) -> None:
    """PEFT takes target parameters that match nothing without a word as long as another target matches."""
    for config in model.peft_config.values():
        for target in getattr(config, "target_parameters", None) or ():
            if not any(f".{name}".endswith(f".{target}") for name in adapted):
                raise ModelError(
                    f"the target parameter `{target}` matches no parameter of the model, so nothing would be trained "
                    f"there: correct target_parameters in the LoraConfig, or remove it."
                )


def _checked(experts: nn.Module, found: list[tuple[str, ParamWrapper]]) -> AdaptedExperts:
    projections = (ExpertsSpec.of(experts).up_name, "down_proj")
    for name, wrapper in found:
        if wrapper.parameter_name not in projections:
            raise ModelError(
                f"`{name}` carries an adapter on `{wrapper.parameter_name}`, which expert parallelism cannot compute: "
                f"adapt {' or '.join(projections)} instead."
            )
    return AdaptedExperts(tuple(wrapper for _, wrapper in found))


def _same(a: Tensor) -> Tensor:
    return a


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
