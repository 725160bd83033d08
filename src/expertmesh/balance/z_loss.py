"""The router z-loss: the mean squared logsumexp of the router's logits, which keeps them from growing.

With `z_r = logsumexp(logits_r)` and the mean over the rows `r` of all tokens of all ranks and of all layers,
`loss += coefficient * mean_r(z_r ** 2)`, and `d/d logits_r = coefficient / rows * 2 z_r softmax(logits_r)`.

How the gradient gets in: it is added where the routing weights, which come from the same logits, enter the experts.
There it is found again when activation checkpointing of either kind runs the layer anew, where a tensor that was
carried out of the layer would have lost its history. How large it is becomes known when the backward pass begins, at
the loss::

    logits --+--> weights --> [enter] --> experts --> ... --> [join] --> loss
             +------------------^                               ^
                                 <-- scale of the gradient ------+  (and the value is added)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from expertmesh.balance.loss_use import loss_use
from expertmesh.balance.ranks import sum_over_ranks
from expertmesh.balance.routed import called_experts, is_recomputation
from expertmesh.errors import ModelError
from expertmesh.ranks import num_ranks

# Row sums of softmax that are 1 but for rounding, bfloat16's included.
_ROUNDING = 0.02


class _Pass:
    """One forward pass of the model: what its layers contribute, and later the scale of their gradients."""

    def __init__(self) -> None:
        self.squares: list[Tensor] = []
        self.rows = 0
        self.gradient_scale: Tensor | None = None

    def add(self, logits: Tensor) -> None:
        self.squares.append(logits.detach().float().logsumexp(-1).square().sum())
        self.rows += len(logits)


class RouterZLoss:
    """Adds the z-loss to the loss that a model is trained with, and its exact gradient.

    Args:
        model: before or after it is sharded. It keeps this object alive.
        coefficient: of the mean squared logsumexp.
        routers: for each router the position of its logits in what it returns.
        to_returned: add it to the loss that the model returns; otherwise to the one given to `join_waiting`.

    Raises:
        ModelError: there are no routers. And when the model runs: routers report probabilities instead of logits, or
            nothing before the experts are called; or the backward pass starts from a loss it was not added to.
    """

    def __init__(
        self, model: nn.Module, coefficient: float, routers: Mapping[nn.Module, int], *, to_returned: bool
    ) -> None:
        if not routers:
            raise ModelError(
                f"ep_z_loss is set, but {type(model).__name__} does not say where its routers' logits are "
                f"(`_can_record_outputs`): set it to 0."
            )
        self._name = type(model).__name__
        self._coefficient = coefficient
        self._to_returned = to_returned
        self._running: _Pass | None = None
        self._logits: Tensor | None = None
        # The pass whose backward is running; a reentrant checkpoint asks for it.
        self._in_backward: _Pass | None = None
        self._checked = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        for router, position in routers.items():
            router.register_forward_hook(self._note_logits(position))
        for called, _ in called_experts(model).values():
            called.register_forward_pre_hook(self._enter)

    def join(self, loss: Tensor, passes: list[_Pass], weight: float) -> Tensor:
        """A loss with the z-loss of the passes it came from added, in the given weight. Collective."""
        squares = torch.stack([layer for one in passes for layer in one.squares]).sum()
        sums = torch.stack([squares, squares.new_full((), sum(one.rows for one in passes))])
        squares, rows = sum_over_ranks(sums).unbind()
        scale = self._coefficient * weight / rows
        return _Join.apply(loss, (squares * scale).to(loss.dtype), scale * num_ranks(), passes, self)

    def begin_backward(self, passes: list[_Pass], gradient_scale: Tensor) -> None:
        """The backward pass has reached the loss."""
        for one in passes:
            one.gradient_scale = gradient_scale
        self._in_backward = passes[-1]

    def _begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._running = _Pass() if model.training and torch.is_grad_enabled() else None

    def _note_logits(self, position: int) -> Any:
        def note(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._logits = output[position] if isinstance(output, tuple) else output

        return note

    def _enter(self, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        logits, self._logits = self._logits, None
        current = self._in_backward if is_recomputation() else self._running
        if current is None:
            return None
        if logits is None:
            raise ModelError(
                f"ep_z_loss needs the logits of every router, but those of {self._name} are not reported before "
                f"{type(experts).__name__} is called: set it to 0."
            )
        if not is_recomputation():
            self._check(logits)
            current.add(logits)
        hidden, index, weights = args
        return hidden, index, _Enter.apply(weights, logits, current)

    def _check(self, logits: Tensor) -> None:
        if self._checked:
            return
        self._checked = True  # Reading back is too slow to do it twice.
        sums = logits.detach().float().sum(-1)
        if bool((logits >= 0).all() & ((sums - 1).abs() < _ROUNDING).all()):
            raise ModelError(
                f"ep_z_loss needs the logits of every router, but what those of {self._name} report are "
                f"probabilities: set it to 0."
            )

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        finished, self._running = self._running, None
        if finished is None or not finished.squares:
            return None
        if not self._to_returned:
            _waiting.append((self, finished))
            return None
        if getattr(output, "loss", None) is None:
            raise ModelError(
                f"ep_z_loss is added to the loss that {self._name} returns, but it returned none: pass `labels`, or "
                f"set ep_z_loss to 0."
            )
        output["loss"] = self.join(output.loss, [finished], 1 / loss_use().multiplied)
        return output


class _Join(torch.autograd.Function):
    """Adds the value to the loss; in backward, tells the layers the scale of their gradients before it gets there."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, loss: Tensor, value: Tensor, gradient_scale: Tensor, passes: list[_Pass], z_loss: RouterZLoss
    ) -> Tensor:
        ctx.gradient_scale, ctx.passes, ctx.z_loss = gradient_scale, passes, z_loss
        return loss + value

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.z_loss.begin_backward(ctx.passes, ctx.gradient_scale * grad.float())
        return grad, None, None, None, None


class _Enter(torch.autograd.Function):
    """Returns the routing weights as they are; in backward, adds the z-loss's gradient to that of the logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, logits: Tensor, current: _Pass) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.current = current
        return weights.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        if ctx.current.gradient_scale is None:
            raise ModelError(
                "ep_z_loss was not added to the loss that this backward pass started from: call "
                "`accelerator.backward(loss)`, or without Accelerate use the loss that the model returns, or set "
                "ep_z_loss to 0."
            )
        values = logits.float()
        gradient = values.softmax(-1) * (2 * values.logsumexp(-1, keepdim=True)) * ctx.current.gradient_scale
        return grad, gradient.to(logits.dtype), None


# Passes that a loss will be computed from.
_waiting: list[tuple[RouterZLoss, _Pass]] = []


def join_waiting(loss: Tensor) -> Tensor:
    """The loss of a micro-batch, with the z-loss of the passes it was computed from. Collective."""
    passes: dict[RouterZLoss, list[_Pass]] = {}
    for z_loss, one in _waiting:
        passes.setdefault(z_loss, []).append(one)
    _waiting.clear()
    for z_loss, its_passes in passes.items():
        loss = z_loss.join(loss, its_passes, 1 / loss_use().micro_batches)
    return loss
