"""Activation checkpointing that never routes twice.

A block that is recomputed in the backward pass would also choose its experts again, and where two experts are nearly
tied, another rounding chooses another one: then other tokens travel than in the forward, and shapes or gradients no
longer fit. So the choice (the indices of `topk`) and the plan of the exchange are always kept, `[tokens, top_k]` a
layer; rows travel again along the route of the forward.

Modes:

- `full` keeps nothing else: memory of one block, and the tokens travel once more;
- `selective` keeps what is dear to get again: received tokens and attention outputs;
- `experts_only` recomputes nothing but what experts need: received tokens and their first projection, which is the most
  of what a block keeps, and which grows where routing is uneven.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from expertmesh.dispatch import ops  # noqa: F401  (defines the operators named below)
from expertmesh.experts import is_experts

logger = logging.getLogger(__name__)

_TOPK = torch.ops.aten.topk.default
ROUTE = frozenset((torch.ops.expertmesh.plan.default,))
DEAR = frozenset(
    (
        torch.ops.expertmesh.send.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    )
)
MODES = {"full": ROUTE, "selective": ROUTE | DEAR}

# The modes in which whole blocks are checkpointed.
OF_BLOCKS = frozenset(MODES)


def recompute_experts(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call the forward of experts, and again in the backward, along the same route, instead of keeping what it made."""
    return checkpoint(
        forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=partial(recompute_contexts, "full")
    )


def recompute_contexts(mode: str = "full") -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`, for one of `MODES`.

    PyTorch's own selective contexts keep whole outputs. Of `topk` only the indices may be kept: routers normalise its
    values in place, and their derivative needs what was there before.
    """
    kept: list[tuple[Any, Any]] = []
    return _Keep(MODES[mode], kept), _Take(MODES[mode], kept)


class _Keep(TorchDispatchMode):
    """Notes the outcome of some operators, in the order of their calls."""

    def __init__(self, operators: frozenset, kept: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._operators = operators
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _TOPK:
            self._kept.append((func, result[1].clone()))
        elif func in self._operators:
            self._kept.append((func, tree_map_only(Tensor, Tensor.detach, result)))
        return result


class _Take(TorchDispatchMode):
    """Takes the noted outcomes instead of computing them again; of `topk`, what now lies at the noted indices."""

    def __init__(self, operators: frozenset, kept: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._operators = operators
        self._kept = kept
        self._position = 0

    def __enter__(self) -> TorchDispatchMode:
        self._position = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _TOPK and func not in self._operators:
            return func(*args, **(kwargs or {}))
        expected, outcome = self._kept[self._position]
        self._position += 1
        if func is not expected:
            raise RuntimeError(f"a block calls {func} in its recomputation where it called {expected} in its forward.")
        if func is not _TOPK:
            return tree_map_only(Tensor, Tensor.detach, outcome)
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        return args[0].gather(dim, outcome), outcome.clone()


def keep_routing(model: nn.Module, mode: str = "full") -> None:
    """Let every checkpointed part of a model that has experts in it recompute in a mode, whoever checkpoints it.

    That is Transformers' `activation_checkpointing_enable` and PyTorch's `checkpoint_wrapper`, which Accelerate uses.
    Parts that already say what they keep are left alone.
    """
    for module in model.modules():
        name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
        function = getattr(module, name, None)
        if function is not None and any(is_experts(part) for part in module.modules()):
            setattr(module, name, _in_mode(function, mode))


def _in_mode(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    keywords = getattr(function, "keywords", {})
    if "context_fn" in keywords:
        return function
    if keywords.get("use_reentrant", True):
        logger.warning(
            "activation checkpointing with use_reentrant=True chooses experts again when it recomputes: set "
            "use_reentrant to False, so that gradients are those of the experts that were used."
        )
        return function
    return partial(function, context_fn=partial(recompute_contexts, mode))
