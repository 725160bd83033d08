"""Transformer Engine 2.20.2's `transformer_engine.pytorch.ep`, as far as it is used: bfloat16, eager, staged copies.

The operators are registered under their real names, for tensors on the CPU. All of them run on the caller's stream, so
there is nothing to wait for. The routing lives in an `EpBuffer`'s `handle_mem`, by whose address it is found again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from emulation import precision
from emulation.collective import Checked
from emulation.errors import EmulationError, require
from emulation.events import GARBAGE, started
from emulation.rows import Rows
from emulation.traffic import check_tokens, check_weights

__version__ = "2.20.2"
DEVICE_TYPES = ("cpu",)
# What `require_nccl_ep` raises, for a machine whose NCCL is too old.
NCCL_FAULT: str | None = None
BUILT: list[tuple] = []
_HANDLE_BYTES = 64
_LIB = "transformer_engine_ep"
_STAMPS = torch.Generator().manual_seed(0)


def __getattr__(name: str) -> object:
    if name == "DTYPES":
        return precision.allowed()
    raise AttributeError(name)


@dataclass
class _Layout:
    """What `prepare` left in a `handle_mem`."""

    rows: Rows
    slot: Tensor
    top_k: int
    stamp: Tensor


@dataclass
class _Group:
    """What `ep_bootstrap` makes, once a process."""

    ranks: Checked
    num_experts: int
    max_tokens: int
    hidden: int
    top_k: int
    max_token_dtype: torch.dtype
    layouts: dict[int, _Layout] = field(default_factory=dict)
    alignment: int | None = None
    num_buffers: int = 0


_GROUP: _Group | None = None


def require_nccl_ep() -> None:
    if NCCL_FAULT is not None:
        raise RuntimeError(NCCL_FAULT)


def ep_bootstrap(
    ep_group: ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    hidden_dim: int,
    num_topk: int,
    recv_capacity_per_rank: int | None = None,
    max_num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
    max_token_dtype: torch.dtype = torch.bfloat16,
) -> None:
    global _GROUP
    if _GROUP is not None:
        raise RuntimeError("ep_bootstrap was already called in this process")
    if recv_capacity_per_rank is not None or zero_copy or drop_on_overflow:
        raise EmulationError("only the eager mode is emulated")
    size = dist.get_world_size(ep_group)
    if size < 2:
        raise ValueError(f"ep_bootstrap requires ep_group.size() >= 2 (got {size}).")
    if num_topk < 1:
        raise ValueError(f"ep_bootstrap requires num_topk >= 1 (got {num_topk}).")
    require(torch._C._current_graph_task_id() == -1, "a group is created in the middle of a backward pass")
    require(max_tokens_per_rank > 0, "max_tokens_per_rank must be positive")
    require(hidden_dim * max_token_dtype.itemsize % 16 == 0, "max_token_bytes: a multiple of 16 bytes")
    require(num_experts % size == 0, "num_experts must be divisible by ep_size")
    ranks = Checked(ep_group)
    sizes = (num_experts, max_tokens_per_rank, hidden_dim, num_topk)
    ranks.check("build buffer", sizes=sizes)
    BUILT.append(sizes)
    _GROUP = _Group(ranks, *sizes, max_token_dtype)


def is_ep_bootstrapped() -> bool:
    return _GROUP is not None


def ep_finalize() -> None:
    global _GROUP
    if _GROUP is None:
        return
    require(dist.is_initialized(), "ncclEpGroupDestroy reads a communicator that its process group has destroyed")
    _GROUP.ranks.check("finalize")
    _GROUP = None


class EpBuffer:
    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        recv_capacity_per_rank: int | None = None,
        alignment: int = 0,
        payload_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        dispatch_fwd_quant_recipe: object = None,
        combine_bwd_quant_recipe: object = None,
    ) -> None:
        if _GROUP is None:
            raise RuntimeError("EpBuffer requires ep_bootstrap() to be called first.")
        if alignment > 1 and alignment & (alignment - 1):
            raise ValueError(f"alignment must be 0, 1, or a power of two (got {alignment}).")
        require(device is not None, "the default is torch.cuda.current_device()")
        self.top_k = top_k
        self.alignment = alignment
        self.max_tokens_per_rank = max_tokens_per_rank
        self.hidden_dim = hidden_dim
        self.num_local_experts = num_local_experts
        self.handle_mem = torch.empty(_HANDLE_BYTES, dtype=torch.uint8, device=device)
        self.tokens_per_expert = torch.full((num_local_experts,), GARBAGE, device=device)
        self.total_recv_tokens = torch.full((1,), GARBAGE)
        _GROUP.num_buffers += 1


@torch.library.custom_op(
    f"{_LIB}::prepare", mutates_args=("handle_mem", "tokens_per_expert", "total_recv_tokens"), device_types="cpu"
)
def _prepare(
    handle_mem: Tensor,
    top_k: int,
    topk_idx: Tensor,
    tokens_per_expert: Tensor,
    alignment: int,
    total_recv_tokens: Tensor,
) -> None:
    group = _group()
    require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx must be contiguous and 2D [T, top_k]")
    require(topk_idx.dtype in (torch.int32, torch.int64), f"topk_idx must be int32 or int64; got {topk_idx.dtype}")
    require(topk_idx.shape[1] == top_k == group.top_k, "Given topk_idx has unmatched num_topk")
    require(len(topk_idx) <= group.max_tokens, "Token count exceeds HT buffer capacity")
    require(bool(((topk_idx >= 0) & (topk_idx < group.num_experts)).all()), "an expert that is not there")
    ordered = topk_idx.sort(1).values
    require(not bool((ordered[:, 1:] == ordered[:, :-1]).any()), "an expert twice in one token's top-k")
    for counts in (tokens_per_expert, total_recv_tokens):
        require(counts.dtype == torch.int64, "tokens_per_expert, total_recv_tokens must be int64")
    require(group.alignment in (None, alignment), "EP prepare alignment disagrees with process-wide cached alignment")
    group.alignment = alignment
    group.ranks.check("prepare", top_k=top_k, alignment=alignment)
    pairs = topk_idx.long().flatten()
    order = pairs.argsort(stable=True)
    token, slot = order // top_k, order % top_k
    rows = Rows.of(group.ranks, len(topk_idx), token, pairs[order], group.num_experts, max(alignment, 1))
    tokens_per_expert.copy_(rows.counts)
    total_recv_tokens.fill_(rows.num_rows)
    handle_mem.random_(0, 256, generator=_STAMPS)
    group.layouts[handle_mem.data_ptr()] = _Layout(rows, slot, top_k, handle_mem.clone())


@torch.library.custom_op(
    f"{_LIB}::dispatch", mutates_args=("recv_tokens", "recv_topk_weights", "recv_scale_inv"), device_types="cpu"
)
def _dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor,
    recv_topk_weights: Tensor,
    tokens_scale_inv: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
) -> None:
    layout = _layout(handle_mem)
    _check_rows(layout, recv_tokens)
    _check_sent(layout, tokens, recv_tokens)
    shape = (layout.rows.num_tokens, layout.top_k)
    require(tuple(topk_idx.shape) == shape, "topk_idx token count must equal tokens token count")
    check_weights(topk_weights, shape)
    check_weights(recv_topk_weights.nan_to_num(), (layout.rows.num_rows,))
    _group().ranks.check("dispatch")
    recv_tokens.copy_(layout.rows.there(tokens[layout.rows.token], gaps=0.0))
    recv_topk_weights.copy_(layout.rows.there(topk_weights[layout.rows.token, layout.slot], gaps=0.0))
    started("dispatch", [recv_tokens, recv_topk_weights], [tokens, topk_weights], is_async=False)


@torch.library.custom_op(f"{_LIB}::combine", mutates_args=("result",), device_types="cpu")
def _combine(handle_mem: Tensor, expert_out: Tensor, result: Tensor) -> None:
    layout = _layout(handle_mem)
    _check_rows(layout, expert_out)
    _check_sent(layout, result, expert_out)
    _group().ranks.check("combine")
    result.copy_(layout.rows.summed(expert_out))
    started("combine", [result], [expert_out], is_async=False)


@torch.library.custom_op(f"{_LIB}::dispatch_bwd", mutates_args=("grad_tokens", "grad_topk_weights"), device_types="cpu")
def _dispatch_bwd(
    handle_mem: Tensor, grad: Tensor, g_recv_topk_weights: Tensor, grad_tokens: Tensor, grad_topk_weights: Tensor
) -> None:
    layout = _layout(handle_mem)
    _check_rows(layout, grad)
    _check_sent(layout, grad_tokens, grad)
    check_weights(g_recv_topk_weights, (layout.rows.num_rows,))
    require(tuple(grad_topk_weights.shape) == (layout.rows.num_tokens, layout.top_k), "grad_topk_weights: [T, top_k]")
    _group().ranks.check("dispatch_bwd")
    grad_tokens.copy_(layout.rows.summed(grad))
    grad_topk_weights[layout.rows.token, layout.slot] = layout.rows.back(g_recv_topk_weights)
    started("dispatch_bwd", [grad_tokens, grad_topk_weights], [grad, g_recv_topk_weights], is_async=False)


@torch.library.custom_op(
    f"{_LIB}::combine_bwd", mutates_args=("grad_expert_out", "grad_expert_out_scale_inv"), device_types="cpu"
)
def _combine_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    grad_expert_out: Tensor,
    grad_scale_inv: Tensor | None = None,
    grad_expert_out_scale_inv: Tensor | None = None,
) -> None:
    layout = _layout(handle_mem)
    _check_rows(layout, grad_expert_out)
    _check_sent(layout, grad, grad_expert_out)
    _group().ranks.check("combine_bwd")
    grad_expert_out.copy_(layout.rows.there(grad[layout.rows.token], gaps=0.0))
    started("combine_bwd", [grad_expert_out], [grad], is_async=False)


def _group() -> _Group:
    require(_GROUP is not None, "EPBackend not initialized. Call nvte_ep_initialize() first.")
    return _GROUP


def _layout(handle_mem: Tensor) -> _Layout:
    layout = _group().layouts.get(handle_mem.data_ptr())
    require(layout is not None, "ep op on handle_mem with no cached entry and no prior nvte_ep_prepare")
    require(torch.equal(layout.stamp, handle_mem), "handle_mem is of another group, or was written to")
    return layout


def _check_rows(layout: _Layout, rows: Tensor) -> None:
    check_tokens(rows, precision.allowed())
    require(len(rows) == layout.rows.num_rows, "recv_pr: rows of this step")


def _check_sent(layout: _Layout, tokens: Tensor, rows: Tensor) -> None:
    check_tokens(tokens, precision.allowed())
    require(len(tokens) == layout.rows.num_tokens, "x->sizes[0] == handle->num_tokens")
    require(tokens.dtype == rows.dtype, "recv_tokens dtype must match tokens dtype")
    require(tokens.dtype.itemsize <= _group().max_token_dtype.itemsize, "tokens dtype wider than max_token_dtype")
    require(tokens.shape[1] == rows.shape[1] == _group().hidden, "hidden_dim")
