"""A rank without tokens: the engines' kernels were never tried with none, so one that picks no expert stands in."""

from __future__ import annotations

from torch import Tensor


def somebody(hidden: Tensor, *routing: Tensor) -> tuple[Tensor, ...]:
    """The tokens `[T, hidden]` as they are, or one token of zeros if there is none; so also its routing.

    Args:
        hidden: tokens, or gradients of theirs.
        routing: indices `[T, top_k]`, which become -1, and weights, which become 0.
    """
    if hidden.shape[0]:
        return hidden, *routing
    return hidden.new_zeros(1, hidden.shape[1]), *(
        tensor.new_full((1, tensor.shape[1]), 0 if tensor.is_floating_point() else -1) for tensor in routing
    )
