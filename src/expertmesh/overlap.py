"""Shared experts are computed while tokens travel.

Every token passes a block's shared experts, which need nothing from other ranks. They start on a stream of their own
when the block does, run beside the routing and the exchange, and are waited for where their result is used::

    main stream     router - dispatch ...waiting... - experts - combine ...waiting... - sum
    side stream     shared experts                                                      ^

Autograd runs their backward on the same streams and orders the two by events itself.

A block calls its shared experts before or after the routed ones. Where it calls them before, their result may stay
awaited only if the block does not look at it until the routed ones have run, which its source tells.

Compilers know no streams: in a compiled block the shared experts are computed where it calls them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

# What Transformers' blocks call the experts that every token passes.
SHARED = ("shared_expert", "shared_experts", "shared_mlp")


class SharedExpertsAhead:
    """Starts a block's shared experts with the block, and hands out their result where the block asks for it.

    Args:
        block: has both kinds of experts; its first argument is what both get.
        shared: the shared experts.
        experts: the routed experts as the block calls them.
        device: where they are computed.
    """

    def __init__(self, block: nn.Module, shared: nn.Module, experts: nn.Module, device: torch.device) -> None:
        self._streams = torch.get_device_module(device)
        self._side = self._streams.Stream()
        self._compute = shared.forward
        self._is_read_late = reads_after_experts(block, shared, experts)
        self._ahead: tuple[Tensor, Tensor] | None = None
        shared.forward = self._answer
        block.register_forward_pre_hook(self._start, prepend=True)
        experts.register_forward_hook(self._wait)

    def _start(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or torch.compiler.is_compiling():
            self._ahead = None
            return
        hidden = args[0]
        self._side.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._side):
            result = self._compute(hidden)
        if hidden.device.type != "cpu":
            # Their memory must not be given to others while the side stream works on it, and the other way round.
            hidden.record_stream(self._side)
            result.record_stream(self._streams.current_stream())
        self._ahead = hidden, result

    def _answer(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compute(hidden)
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _is_same(hidden, ahead[0]):
            return self._compute(hidden)
        if not self._is_read_late:
            self._wait()
        return ahead[1].view(*hidden.shape[:-1], ahead[1].shape[-1])

    def _wait(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._streams.current_stream().wait_stream(self._side)


def run_shared_experts_ahead(model: nn.Module, called_experts: Collection[nn.Module], device: torch.device) -> None:
    """Start the shared experts of every block with the block.

    Args:
        model: its experts have their expert-parallel forward.
        called_experts: what the model calls for its experts modules, adapters around them included.
        device: where the model is computed.
    """
    for block in model.modules():
        children = dict(block.named_children())
        routed = [child for child in children.values() if child in called_experts]
        shared = [children[name] for name in SHARED if name in children]
        if len(routed) == 1 and len(shared) == 1:
            SharedExpertsAhead(block, *shared, *routed, device)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """The same numbers in the same memory, perhaps in another shape."""
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.numel() == other.numel()
        and tensor.shape[-1] == other.shape[-1]
        and tensor.is_contiguous()
        and other.is_contiguous()
    )


def reads_after_experts(block: nn.Module, shared: nn.Module, experts: nn.Module) -> bool:
    """Whether a block's source shows that the shared experts' result is not looked at before the routed ones have run.

    That is: they are called after them, or in an assignment to a name that is read only behind their call.
    """
    names = {id(child): name for name, child in block.named_children()}
    if id(shared) not in names or id(experts) not in names:
        return False
    try:
        source = textwrap.dedent(inspect.getsource(type(block).forward))
    except (OSError, TypeError):
        return False
    (function,) = ast.parse(source).body
    statements = function.body
    of_shared = _calls_of(names[id(shared)], statements)
    of_experts = _calls_of(names[id(experts)], statements)
    if len(of_shared) != 1 or len(of_experts) != 1:
        return False
    (first,), (last,) = of_shared, of_experts
    if first > last:
        return True
    assignment = statements[first]
    if not (isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Call)):
        return False
    (target,) = assignment.targets
    between = statements[first + 1 : last + 1]
    return isinstance(target, ast.Name) and first < last and not any(_reads(part, target.id) for part in between)


def _calls_of(name: str, statements: list[ast.stmt]) -> list[int]:
    """Which statements call `self.<name>(...)`."""
    return [
        number
        for number, statement in enumerate(statements)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(statement)
    )
