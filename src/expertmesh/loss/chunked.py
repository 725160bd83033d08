"""A linear head and its cross-entropy, a piece of the vocabulary at a time.

With logits `z = h W^T + b` `[tokens, vocabulary]`, a target `y` and smoothing `e` over `V` entries, a token's loss is::

    L = logsumexp(z) - (1 - e) z_y - e mean(z)          dL/dz = softmax(z) - (1 - e) onehot(y) - e / V

The forward goes over the vocabulary once, for the logsumexp and the two other terms, and keeps nothing but the
logsumexp. The backward makes each piece of the logits again. A piece is of all tokens and some of the vocabulary, so
that the weight's gradient is one product a piece, as exact as in whole, and nothing has to be added up in few bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Of float32 logits at a time. A product of this size keeps any device busy.
PIECE_BYTES = 64 * 2**20


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum of the tokens' losses.

    Args:
        hidden: `[tokens, features]`.
        weight: `[vocabulary, features]` in the same dtype, in which logits are multiplied; the rest is float32.
        bias: `[vocabulary]`.
        targets: `[tokens]` int64.
        ignore_index: the target of tokens that do not count.
        label_smoothing: what is spread over the whole vocabulary, from 0 to 1.

    Returns:
        A float32 scalar.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, ignore_index, label_smoothing)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        counted = targets != ignore_index
        targets = targets.where(counted, 0)
        total = hidden.new_full(targets.shape, float("-inf"), dtype=torch.float32)
        of_target, mean = torch.zeros_like(total), torch.zeros_like(total)
        for start, stop in _pieces(hidden, weight):
            logits = _logits(hidden, weight, bias, start, stop)
            torch.logaddexp(total, logits.logsumexp(1), out=total)
            of_target += _at(logits, targets, start)
            if label_smoothing:
                mean += logits.sum(1) / weight.shape[0]
        losses = total - (1 - label_smoothing) * of_target - label_smoothing * mean
        ctx.save_for_backward(hidden, weight, bias, targets, counted, total)
        ctx.label_smoothing = label_smoothing
        return losses.where(counted, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, counted, total = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        factor = (grad * counted).unsqueeze(1)
        for start, stop in _pieces(hidden, weight):
            grad_logits = _logits(hidden, weight, bias, start, stop).sub_(total.unsqueeze(1)).exp_()
            if ctx.label_smoothing:
                grad_logits -= ctx.label_smoothing / weight.shape[0]
            _subtract_at(grad_logits, targets, start, 1 - ctx.label_smoothing)
            grad_logits *= factor
            if needs_bias:
                grad_bias[start:stop] = grad_logits.sum(0)
            rounded = grad_logits.to(hidden.dtype)
            if needs_weight:
                torch.mm(rounded.t(), hidden, out=grad_weight[start:stop])
            if needs_hidden:
                grad_hidden += rounded @ weight[start:stop]
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype)), grad_weight, grad_bias, None, None, None


def _pieces(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """The vocabulary in ranges of a size that every GEMM likes."""
    size = max(PIECE_BYTES // (torch.float32.itemsize * max(hidden.shape[0], 1)) // 256 * 256, 256)
    vocabulary = weight.shape[0]
    return [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """Some of the logits, `[tokens, stop - start]` float32, a tensor of its own."""
    some = torch.nn.functional.linear(hidden, weight[start:stop], None if bias is None else bias[start:stop])
    return some.float()


def _at(logits: Tensor, targets: Tensor, start: int) -> Tensor:
    """`[tokens]`, the logit of each target that is among these, 0 for others."""
    inside = (targets >= start) & (targets < start + logits.shape[1])
    index = (targets - start).where(inside, 0).unsqueeze(1)
    return logits.gather(1, index).squeeze(1).where(inside, 0.0)


def _subtract_at(logits: Tensor, targets: Tensor, start: int, amount: float) -> None:
    """Subtract an amount at each target that is among these."""
    inside = (targets >= start) & (targets < start + logits.shape[1])
    index = (targets - start).where(inside, 0).unsqueeze(1)
    logits.scatter_add_(1, index, inside.unsqueeze(1).float().mul_(-amount))
