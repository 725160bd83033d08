"""What happens between the two projections of an expert, and its derivative.

A pullback returns the activation together with the function that takes the activation's gradient back to the
projection's, so that the backward pass needs nothing saved but the projection's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from expertmesh.experts import ExpertsSpec


class Gate(Protocol):
    """`[rows, up_width]` to `[rows, intermediate]`."""

    def __call__(self, projected: Tensor) -> Tensor:
        """The activation of the up projection's output."""

    def pullback(self, projected: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The activation, and the map from its gradient to the gradient of `projected`."""


class SiluGate:
    """`silu(gate) * up` on concatenated halves: Transformers' default gating, differentiated by hand."""

    def __call__(self, projected: Tensor) -> Tensor:
        """See `Gate`."""
        gate, up = projected.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def pullback(self, projected: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `Gate`."""
        gate, up = projected.chunk(2, dim=-1)
        silu = F.silu(gate)

        def backward(grad: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                # A compiler makes one kernel of it, and knows no output that is a part of a tensor.
                grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
                return torch.cat((grad_gate, grad * silu), dim=-1)
            grad_projected = torch.empty_like(projected)
            grad_gate, grad_up = grad_projected.chunk(2, dim=-1)
            torch.mul(grad, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
            return grad_projected

        return silu * up, backward


class ModelGate:
    """Whatever the model's own module does, differentiated by autograd: clamps, interleaved halves, no gate at all."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, projected: Tensor) -> Tensor:
        """See `Gate`."""
        return self.function(projected)

    def pullback(self, projected: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `Gate`."""
        activation, pullback = torch.func.vjp(self.function, projected)
        return activation, lambda grad: pullback(grad)[0]


def gate_of(experts: nn.Module, spec: ExpertsSpec) -> Gate:
    """The gate of an experts module. Only the plain SiLU gate is known by heart; everything else is the model's."""
    if not spec.has_gate:
        return ModelGate(experts.act_fn)
    own_gate = type(experts)._apply_gate is not _default_apply_gate
    if own_gate or not isinstance(experts.act_fn, nn.SiLU | SiLUActivation):
        return ModelGate(experts._apply_gate)
    return SiluGate()
