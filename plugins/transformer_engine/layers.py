"""Transformer Engine's layers in the place of a model's own: `ep_layers: te`. Written against version 2.20.2.

`nn.Linear` becomes `Linear`, every RMSNorm that is recognised by what it computes becomes `RMSNorm` (Gemma's, which
adds one to its weight, too), and attention becomes `DotProductAttention`. Norms of other kinds stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
from expertmesh_plugins.transformer_engine.engine import load, missing
from expertmesh_plugins.transformer_engine.recipe import alignment_of, build_recipe, use_recipe
from torch import nn

from expertmesh.config import ExpertParallelConfig
from expertmesh.layers import Layers, Stays
from expertmesh.norms import LeanRMSNorm, find_rms_norms

_PYTORCH = "transformer_engine.pytorch"
_HERE = __name__.rpartition(".")[0]


class TransformerEngineLayers(Layers):
    """See the module's docstring."""

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        """See `Layers.refusal`."""
        reason = missing(_PYTORCH)
        if reason is not None:
            return reason
        devices = getattr(load(_PYTORCH), "DEVICE_TYPES", ("cuda",))
        if device.type not in devices:
            return (
                f"Transformer Engine computes on {' or '.join(devices)}, not on {device.type}: set ep_layers to auto."
            )
        return None

    def __init__(self, config: ExpertParallelConfig, device: torch.device, fp8: bool) -> None:
        self._recipe = build_recipe(config.ep_fp8_recipe) if fp8 else None
        self._alignment = 1 if self._recipe is None else alignment_of(self._recipe)
        self._norms: dict[nn.Module, LeanRMSNorm] = {}

    def prepare(self, model: nn.Module, experts: Mapping[str, nn.Module]) -> None:
        """See `Layers.prepare`."""
        self._norms = {norm.module: norm for _, norm in find_rms_norms(model)}
        if self._recipe is not None:
            for module in experts.values():
                use_recipe(module, self._recipe)

    def replacement(self, module: nn.Module) -> nn.Module | Stays | None:
        """See `Layers.replacement`."""
        # What inherits from nn.Linear multiplies in some way of its own.
        if type(module) is nn.Linear:
            sizes = module.in_features, module.out_features
            if any(size % self._alignment for size in sizes):
                return Stays(f"with 8 bits both sizes must be multiples of {self._alignment}")
            return import_module(f"{_HERE}.linear").Linear(module, self._recipe)
        if module in self._norms:
            return import_module(f"{_HERE}.norm").RMSNorm(self._norms[module])
        return None

    def finish(self, model: nn.Module, stays: Sequence[nn.Module]) -> Mapping[str, Stays]:
        """See `Layers.finish`."""
        unable = import_module(f"{_HERE}.attention").install(model, list(stays))
        return {name: Stays(reason) for name, reason in unable.items()}
