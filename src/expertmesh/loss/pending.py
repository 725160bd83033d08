"""Logits that are made when somebody looks at them.

What a head returns has to pass for its logits: the model's loss function gets it, wrappers cast it to float32, scripts
may read it. `PendingLogits` says what it is (shape, dtype, device) and holds what it would be made of. A loss that
knows it takes the hidden states and the weight instead; anybody else's first operation on it makes the logits, with
their derivative, as the head would have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Head:
    """A linear head at one call.

    Attributes:
        hidden: `[..., features]`.
        weight: `[vocabulary, features]`.
        bias: `[vocabulary]`.
        gather: called before the weight is used after the model's forward; FSDP2 may have freed it by then.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    gather: Callable[[], None]


# What only asks what a tensor is, or gives the same numbers in another dtype.
_ASKS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "is_cuda")
) | frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size))
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}


class PendingLogits(Tensor):
    """`[..., vocabulary]`; see the module's docstring."""

    head: Head

    @staticmethod
    def of(head: Head, dtype: torch.dtype) -> PendingLogits:
        """Logits of a head in some dtype; they are multiplied in that of the hidden states."""
        shape = (*head.hidden.shape[:-1], head.weight.shape[0])
        pending = Tensor._make_wrapper_subclass(PendingLogits, shape, dtype=dtype, device=head.hidden.device)
        pending.head = head
        return pending

    def make(self) -> Tensor:
        """The logits, differentiable."""
        head = self.head
        head.gather()
        return F.linear(head.hidden, head.weight, head.bias).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        dtype = _cast(func, args, kwargs)
        if dtype is not None:
            return cls.of(args[0].head, dtype)
        made = torch.utils._pytree.tree_map_only(PendingLogits, PendingLogits.make, (args, kwargs))
        return func(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = torch.utils._pytree.tree_map_only(PendingLogits, PendingLogits.make, (args, kwargs or {}))
        return func(*made[0], **made[1])


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call asks for, if it asks for nothing else."""
    if func in _CASTS and len(args) == 1:
        return _CASTS[func]
    if func is not Tensor.to:
        return None
    asked = [*args[1:], *kwargs.values()]
    if len(asked) == 1 and isinstance(asked[0], torch.dtype) and asked[0].is_floating_point:
        return asked[0]
    return None
