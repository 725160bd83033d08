"""Transports as operators of PyTorch: differentiable, and visible to selective checkpointing and to compilers.

A transfer has a start and an end, so that work can be put in between, and its derivative is the opposite transfer, of
which the end is the derivative of the start::

    forward     send  ->  arrive  ->  experts  ->  send_back  ->  come_back
    backward    wait  <-  start   <-           <-  wait       <-  start
                (gradients of tokens travel      (gradients of results travel
                 back to where they live)         to the ranks of the experts)

Whoever starts two transfers before ending one, in the forward, has the same overlap in the backward. Gradients travel
outside of autograd, from one half to the other through `Route.in_flight`: between them autograd is shown zeros of the
right shape that take no memory.

`plan` is an operator of its own: a policy that saves its result and recomputes all else (`recompute.py`) never routes
twice.

On fake tensors, sizes that an engine reads back are symbols. Where the fake mode has none to give (no `ShapeEnv`), the
engine's own code runs, and what it reads is for that mode to say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.function import FunctionCtx, once_differentiable

from expertmesh.dispatch.transport import Route, Transport, TransportHandle

# The half of a derivative that is under way: see the module's docstring.
_SENT_BACK, _SENT = "gradients of tokens", "gradients of results"


def _plan(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, transport: TransportHandle) -> Route:
    """See `Transport.plan`."""
    return transport.transport.plan(hidden, top_k_index, top_k_weights)


plan = torch.library.custom_op("expertmesh::plan", _plan, mutates_args=())


@plan.register_fake
def _(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, transport: TransportHandle) -> Route:
    if not _has_symbols(hidden):
        return _plan(hidden, top_k_index, top_k_weights, transport)
    num_local_experts = transport.transport.situation.num_local_experts
    return Route(hidden.shape[0], top_k_index.new_empty(num_local_experts), None, None)


def _send(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, route: Route, transport: TransportHandle
) -> list[Tensor]:
    """Start `Transport.send`; what it returns is not there before `arrive`."""
    transfer = route.take_first() or transport.transport.send(route, hidden, (top_k_index, top_k_weights))
    route.in_flight["tokens"] = transfer
    return [tensor for tensor in transfer.tensors if tensor is not None]


send = torch.library.custom_op("expertmesh::send", _send, mutates_args=())


@send.register_fake
def _(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, route: Route, transport: TransportHandle
) -> list[Tensor]:
    if not _has_symbols(hidden):
        return _send(hidden, top_k_index, top_k_weights, route, transport)
    received = torch.library.get_ctx().new_dynamic_size()
    return transport.transport.fake_received(received, hidden, top_k_index)


def _send_setup(ctx: FunctionCtx, inputs: tuple, output: list[Tensor]) -> None:
    *_, ctx.route, ctx.transport = inputs


def _send_backward(ctx: FunctionCtx, _: list[Tensor]) -> tuple[Tensor | None, ...]:
    tensors = _end_of(ctx.route, _SENT_BACK)
    grad_hidden, grad_weights = ctx.transport.transport.returned(ctx.route, tensors)
    return grad_hidden, None, grad_weights, None, None


send.register_autograd(_send_backward, setup_context=_send_setup)


def _send_back(rows: Tensor, route: Route, transport: TransportHandle) -> Tensor:
    """Start `Transport.send_back` of results; what it returns is not there before `come_back`."""
    transfer = transport.transport.send_back(route, rows, None)
    route.in_flight["results"] = transfer
    return transfer.tensors[0]


send_back = torch.library.custom_op("expertmesh::send_back", _send_back, mutates_args=())


@send_back.register_fake
def _(rows: Tensor, route: Route, transport: TransportHandle) -> Tensor:
    if not _has_symbols(rows):
        return _send_back(rows, route, transport)
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size(), rows.shape[1])


def _send_back_setup(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, ctx.route, _ = inputs


def _send_back_backward(ctx: FunctionCtx, _: Tensor) -> tuple[Tensor | None, ...]:
    return _end_of(ctx.route, _SENT)[0], None, None


send_back.register_autograd(_send_back_backward, setup_context=_send_back_setup)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, transport: Transport, route: Route, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.transport, ctx.route = transport, route
        ctx.shapes = [tensor.shape for tensor in sent]
        _wait_for(route, "tokens")
        # An operator returns no None: where rows arrive there are no ids.
        tokens, weights, expert_ids = transport.received(route, (*sent, None) if transport.brings_rows else sent)
        if expert_ids is None:
            return tokens, weights
        ctx.mark_non_differentiable(expert_ids)
        return tokens, weights, expert_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_tokens: Tensor, grad_weights: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        transfer = ctx.transport.send_back(ctx.route, grad_tokens.contiguous(), grad_weights.float().contiguous())
        ctx.route.in_flight[_SENT_BACK] = transfer
        return None, None, *(_nothing(grad_tokens, shape) for shape in ctx.shapes)


class _ComeBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, transport: Transport, route: Route, sent_back: Tensor) -> Tensor:
        ctx.transport, ctx.route, ctx.shape = transport, route, sent_back.shape
        _wait_for(route, "results")
        hidden, _ = transport.returned(route, (sent_back, None))
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.route.in_flight[_SENT] = ctx.transport.send(ctx.route, grad.contiguous(), None)
        return None, None, _nothing(grad, ctx.shape)


def arrive(transport: Transport, route: Route, sent: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """End what `send` started.

    Returns:
        See `Transport.send`.
    """
    tokens, weights, *expert_ids = _Arrive.apply(transport, route, *sent)
    return tokens, weights, *(expert_ids or (None,))


def come_back(transport: Transport, route: Route, sent_back: Tensor) -> Tensor:
    """End what `send_back` started: `[tokens, hidden]`."""
    return _ComeBack.apply(transport, route, sent_back)


def _has_symbols(fake: Tensor) -> bool:
    return detect_fake_mode(fake).shape_env is not None


def _wait_for(route: Route, what: str) -> None:
    # Nothing is under way where a recomputation got the tensors of the forward, which have long been there.
    if what in route.in_flight:
        _end_of(route, what)


def _end_of(route: Route, what: str) -> tuple[Tensor | None, ...]:
    transfer = route.in_flight.pop(what)
    transfer.wait()
    return transfer.tensors


def _nothing(like: Tensor, shape: torch.Size) -> Tensor:
    return like.new_zeros(()).expand(shape)
