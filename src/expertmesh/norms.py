"""RMSNorm that keeps its input for the backward, and one number a row, instead of every intermediate result.

Written out in PyTorch, as models have it, a norm in bfloat16 keeps a float32 copy of its input and the normalised rows:
2.5 times its input beside what is kept anyway, and with a norm on queries and keys more than attention itself. Here the
forward computes the very numbers that the model's own computes; with `x` `[..., width]` and `r = 1 / rms(x)`::

    y = f(x r, w)       grad_n = f'(grad_y, w)       grad_x = r (grad_n - x r mean(grad_n x r))

The derivative is taken in float32.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True)
class RMSNormKind:
    """What a family does with normalised rows.

    Attributes:
        weight_offset: added to the weight, 1 in Gemma's.
        rounds_first: the normalised rows are cast to the input's dtype before they are weighted, as in Llama.
        weight_in_float32: the weight is cast before it is used.
        keeps_dtype: the output has the input's dtype whatever the weight's is.
    """

    weight_offset: float
    rounds_first: bool
    weight_in_float32: bool
    keeps_dtype: bool

    def weighted(self, normalised: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Float32 rows `[..., width]` and a weight `[width]` to the norm's output; `dtype` is its input's."""
        weight = weight.float() if self.weight_in_float32 else weight
        factor = weight + self.weight_offset if self.weight_offset else weight
        output = factor * (normalised.to(dtype) if self.rounds_first else normalised)
        return output.to(dtype) if self.keeps_dtype else output


KINDS = (
    RMSNormKind(0.0, rounds_first=True, weight_in_float32=False, keeps_dtype=False),
    RMSNormKind(0.0, rounds_first=False, weight_in_float32=False, keeps_dtype=True),
    RMSNormKind(0.0, rounds_first=False, weight_in_float32=True, keeps_dtype=True),
    RMSNormKind(1.0, rounds_first=False, weight_in_float32=True, keeps_dtype=True),
)


@dataclass(frozen=True)
class LeanRMSNorm:
    """The forward of a norm module, called in place of its own.

    Attributes:
        module: holds the weight.
        kind: what is computed.
        epsilon: added to the mean square.
    """

    module: nn.Module
    kind: RMSNormKind
    epsilon: float

    def __call__(self, hidden_states: Tensor) -> Tensor:
        # FSDP2 swaps the attribute between its sharded and its gathered form, so it is looked up at every call.
        return _RMSNorm.apply(hidden_states, self.module.weight, self.kind, self.epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, kind: RMSNormKind, epsilon: float) -> Tensor:
        normalised, reciprocal = _normalise(hidden, epsilon)
        ctx.kind = kind
        ctx.save_for_backward(hidden, weight, reciprocal)
        return kind.weighted(normalised, weight, hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, reciprocal = ctx.saved_tensors
        grad, normalised = grad.float(), hidden.float() * reciprocal
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = normalised.to(hidden.dtype) if ctx.kind.rounds_first else normalised
            grad_weight = (grad * rows).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_normalised = grad * (weight.float() + ctx.kind.weight_offset)
            along = (grad_normalised * normalised).mean(-1, keepdim=True)
            grad_hidden = (grad_normalised - normalised * along).mul_(reciprocal).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None


def _normalise(hidden: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The float32 rows `[..., width]` and what they were multiplied by, `[..., 1]`."""
    wide = hidden.float()
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * reciprocal, reciprocal


def find_rms_norms(model: nn.Module) -> Iterator[tuple[str, LeanRMSNorm]]:
    """Every module of a model whose forward is, bit for bit, one of `KINDS`, with its qualified name.

    That is tried out on a few rows, once a class; nothing is told from a name.
    """
    known: dict[tuple[type, str], RMSNormKind | None] = {}
    for name, module in model.named_modules():
        epsilon = _epsilon_name(module)
        if epsilon is None:
            continue
        key = type(module), epsilon
        if key not in known:
            known[key] = _recognise(module, epsilon)
        if known[key] is not None:
            yield name, LeanRMSNorm(module, known[key], getattr(module, epsilon))


def keep_less(model: nn.Module) -> list[str]:
    """Let every RMSNorm of a model keep no more than it must; what it computes stays as it is.

    Returns:
        The qualified names of the norms.
    """
    found = list(find_rms_norms(model))
    for _, norm in found:
        norm.module.forward = norm
    return [name for name, _ in found]


def _epsilon_name(module: nn.Module) -> str | None:
    """The attribute that holds the epsilon of what may be an RMSNorm: one weight `[width]`, and nothing else."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"weight"} or parameters["weight"].ndim != 1 or "forward" in module.__dict__:
        return None
    if next(module.buffers(), None) is not None or isinstance(module, nn.LayerNorm):
        return None
    names = [name for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    return names[0] if len(names) == 1 else None


def _recognise(module: nn.Module, epsilon: str) -> RMSNormKind | None:
    """Which of `KINDS` a module computes; None if it is another, or can be called with more than hidden states."""
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    probe = copy.copy(module)
    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(64, generator=generator)
        # Rows so small that epsilon counts, and others.
        rows = torch.randn(8, 64, generator=generator) * torch.logspace(-4, 1, 8).unsqueeze(1)
        cases = [(rows.to(a), weight.to(b)) for a in (torch.float32, torch.bfloat16) for b in (a, torch.float32)]
        matches = list(KINDS)
        for hidden, of_weight in cases:
            probe._parameters = {"weight": nn.Parameter(of_weight)}
            expected = _forward(probe, hidden)
            matches = [kind for kind in matches if _same(expected, kind, hidden, of_weight, getattr(module, epsilon))]
    return matches[0] if matches else None


def _forward(probe: nn.Module, hidden: Tensor) -> Tensor | None:
    try:
        return type(probe).forward(probe, hidden)
    # It is somebody's module, which may want anything.
    except Exception:
        return None


def _same(expected: Tensor | None, kind: RMSNormKind, hidden: Tensor, weight: Tensor, epsilon: float) -> bool:
    if not isinstance(expected, Tensor):
        return False
    ours = kind.weighted(_normalise(hidden, epsilon)[0], weight, hidden.dtype)
    return ours.dtype == expected.dtype and torch.equal(ours, expected)
