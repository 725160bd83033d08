"""Experts on Transformer Engine's `GroupedLinear`: `ep_compute: te`. Written against Transformer Engine 2.20.2.

One for each projection, and two for each adapter. They have no parameters: at each call they borrow views of the
model's stacked weights, whose gradients return to the stack. The function is that of `expertmesh.compute.routed`, and
equal to it in float32. In fewer bits it is rounded elsewhere: where the down projection has no bias, the routing weight
scales its input, before that is rounded, and not its output.

With 8 bits (`te.autocast`, or the recipe that the experts were told to use, see `recipe`) each expert's rows are filled
up with zeros to what the recipe asks for; adapters are computed in the dtype of the rows.

As in `routed`, the gathered rows and the activation are not kept for the backward, but made anew: Transformer Engine
would keep them. With 8 bits it keeps its rounded ones, half as large.

Transformer Engine splits rows on the host: with a dispatcher that leaves the counts on the device, each call waits for
the device once.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import ClassVar

import torch
from expertmesh_plugins.transformer_engine.engine import load, missing
from expertmesh_plugins.transformer_engine.expert_rows import Gated, PaddedRows, scaled_gradient
from expertmesh_plugins.transformer_engine.recipe import in_bits_of, recipe_of
from expertmesh_plugins.transformer_engine.remade import remade
from torch import Tensor, nn
from torch.func import functional_call

from expertmesh.compute.gate import gate_of
from expertmesh.compute.projection import ProjectionTensors
from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.routed import ExpertTensors
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec

_PYTORCH = "transformer_engine.pytorch"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TransformerEngineExperts(ExpertCompute):
    """See the module's docstring."""

    # Transformer Engine does, as it splits the rows on the host; where a dispatcher does not bring them they are read.
    needs_counts_on_host: ClassVar[bool] = False

    @classmethod
    def refusal(cls, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertCompute.refusal`."""
        reason = missing(_PYTORCH)
        if reason is not None:
            return reason
        devices = getattr(load(_PYTORCH), "DEVICE_TYPES", ("cuda",))
        if device.type not in devices:
            return (
                f"Transformer Engine computes on {' or '.join(devices)}, not on {device.type}: set ep_compute to auto."
            )
        if dtype not in _DTYPES:
            return f"Transformer Engine does not compute in {dtype}: set mixed_precision to bf16."
        if spec.is_transposed:
            return (
                f"{type(experts).__name__} stores weights as [experts, in, out] and Transformer Engine takes "
                f"[out, in], so that every step would copy them all: set ep_compute to auto."
            )
        return None

    def __init__(self, experts: nn.Module, spec: ExpertsSpec, gradient_scale: float) -> None:
        self._name = type(experts).__name__
        self._recipe = recipe_of(experts)
        # A bias is added to the down projection, and has to be weighted too.
        self._weighs_last = spec.has_bias
        self._gate = gate_of(experts, spec)
        self._up = _Projection(gradient_scale)
        self._down = _Projection(gradient_scale)

    # `GroupedLinear` cuts compiled graphs itself, again and again.
    @torch.compiler.disable
    def __call__(self, tensors: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows) -> Tensor:
        """See `ExpertCompute.__call__`.

        Raises:
            ConfigError: the experts' dimensions do not suit the recipe of 8 bits that is in use.
        """
        with in_bits_of(self._recipe):
            return self._compute(tensors, tokens, row_weights, rows)

    def _compute(self, tensors: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows) -> Tensor:
        padded = PaddedRows(rows, self._alignment(tensors))
        weights = padded.gather_weights(row_weights)
        projected = self._project(tensors.up, tokens, padded)
        results = self._project_back(tensors.down, projected, None if self._weighs_last else weights, padded)
        if self._weighs_last:
            results = results.float() * padded.only_real(weights)
        return padded.sum_by_token(results, tokens)

    def _project(self, up: ProjectionTensors, tokens: Tensor, padded: PaddedRows) -> Tensor:
        gathered = padded.gather(tokens)
        if padded.are_tokens:
            return self._up(up, gathered, padded.splits)
        kept = tokens.detach()
        with remade(gathered, lambda: padded.gather(kept)):
            return self._up(up, gathered, padded.splits)

    def _project_back(
        self, down: ProjectionTensors, projected: Tensor, weights: Tensor | None, padded: PaddedRows
    ) -> Tensor:
        gated = partial(Gated.apply, self._gate)
        activation = gated(projected, weights)
        kept = [None if tensor is None else tensor.detach() for tensor in (projected, weights)]
        with remade(activation, lambda: gated(*kept)):
            return padded.only_real(self._down(down, activation, padded.splits))

    def _alignment(self, tensors: ExpertTensors) -> int:
        """What the rows of each expert have to be a multiple of."""
        quantization = load(f"{_PYTORCH}.quantization")
        if not quantization.FP8GlobalStateManager.is_fp8_enabled():
            return 1
        alignment = quantization.get_align_size_for_quantization(quantization.FP8GlobalStateManager.get_fp8_recipe())
        for weight in (tensors.up.weight, tensors.down.weight):
            if any(size % alignment for size in weight.shape[1:]):
                raise ConfigError(
                    f"{self._name} has matrices of {tuple(weight.shape[1:])}, and the fp8 recipe in "
                    f"use takes multiples of {alignment}: set ep_compute to auto, which computes experts in bf16."
                )
        return alignment


class _Projection:
    """One linear map of every expert, see `expertmesh.compute.projection`.

    Args:
        gradient_scale: factor on the gradients of all parameters.
    """

    def __init__(self, gradient_scale: float) -> None:
        self._scale = gradient_scale
        self._base = _Grouped()
        self._a = _Grouped()
        self._b = _Grouped()

    def __call__(self, tensors: ProjectionTensors, rows: Tensor, splits: list[int]) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        bias = None if tensors.bias is None else self._ready(tensors.bias, rows.dtype)
        result = self._base(self._ready(tensors.weight, rows.dtype), bias, rows, splits)
        if tensors.adapter is None:
            return result
        with load(_PYTORCH).autocast(enabled=False):
            a, b = (self._ready(matrix, rows.dtype) for matrix in (tensors.adapter.a, tensors.adapter.b))
            thin = self._a(a, None, rows, splits)
            return result + tensors.adapter.scaling * self._b(b, None, thin, splits)

    def _ready(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return scaled_gradient(parameter, self._scale).to(dtype)


class _Grouped:
    """A `GroupedLinear` without parameters, made once it is known how many experts there are."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None

    def __call__(self, weight: Tensor, bias: Tensor | None, rows: Tensor, splits: list[int]) -> Tensor:
        """`[rows, in]` by `[experts, out, in]`, plus `[experts, out]`."""
        if self._module is None:
            self._module = _empty(load(_PYTORCH), weight, bias)
        borrowed = {f"weight{i}": matrix for i, matrix in enumerate(weight.unbind(0))}
        if bias is not None:
            borrowed |= {f"bias{i}": vector for i, vector in enumerate(bias.unbind(0))}
        return functional_call(self._module, borrowed, (rows.contiguous(), torch.tensor(splits)))


def _empty(engine: ModuleType, weight: Tensor, bias: Tensor | None) -> nn.Module:
    num_experts, out_features, in_features = weight.shape
    # On a device it would allocate the weights once more. Only the string is taken for "meta" by all of its modules.
    return engine.GroupedLinear(
        num_experts, in_features, out_features, bias=bias is not None, params_dtype=weight.dtype, device="meta"
    )
