"""Transformer Engine's `Linear` in the place of `nn.Linear`. Import it only where Transformer Engine is installed."""

from __future__ import annotations

from typing import Any

import transformer_engine.pytorch as te
from expertmesh_plugins.transformer_engine.recipe import alignment_of, in_bits_of
from torch import Tensor, nn
from torch.nn import functional as F


class _LinearByName(nn.Linear):
    """Makes its heirs `nn.Linear`, as which PEFT and others look for layers, without building one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Linear(te.Linear, _LinearByName):
    """A Linear with the Parameters of another. State dicts have the same keys: there is no `_extra_state`.

    Args:
        linear: what it replaces.
        recipe: of 8 bits, or None.
    """

    # Without these Transformer Engine adds a key to every state dict, and wants it back.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, linear: nn.Linear, recipe: Any | None) -> None:
        has_bias = linear.bias is not None
        # Only the string is taken for "meta" here; `torch.device("meta")` would allocate on the GPU.
        super().__init__(
            linear.in_features, linear.out_features, bias=has_bias, params_dtype=linear.weight.dtype, device="meta"
        )
        self.weight = linear.weight
        # Transformer Engine has an empty tensor for no bias, and models ask for None.
        self.bias = linear.bias
        self._recipe = recipe
        self._alignment = 1 if recipe is None else alignment_of(recipe)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`. With 8 bits, rows of zeros fill up what the recipe asks for."""
        if self._recipe is None:
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        output = self._in_8_bits(F.pad(rows, (0, 0, 0, -len(rows) % self._alignment)))
        return output[: len(rows)].view(*input.shape[:-1], self.out_features)

    def _in_8_bits(self, rows: Tensor) -> Tensor:
        with in_bits_of(self._recipe):
            return super().forward(rows)
