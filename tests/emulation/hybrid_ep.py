"""`HybridEPBuffer` of DeepEP's branch hybrid-ep, as far as it is used: one NVLink domain, bfloat16, blocking.

Everything runs on the caller's stream, so there is nothing to wait for. Rows of one expert come in another order after
each layout, and in the same one along a handle.
"""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from emulation import precision
from emulation.collective import Checked
from emulation.errors import EmulationError, require
from emulation.events import started
from emulation.rows import Rows
from emulation.traffic import check_tokens

__version__ = "1.2.1"
DEVICE_TYPES = ("cpu",)
_TOKENS_IN_CHUNK = 64
_SMALLEST_BUFFER = 512
ALIVE: weakref.WeakSet[HybridEPBuffer] = weakref.WeakSet()
# Layouts of which a handle lives.
HANDLES: weakref.WeakSet[Rows] = weakref.WeakSet()
BUILT: list[tuple] = []


def __getattr__(name: str) -> object:
    if name == "DTYPES":
        return precision.allowed()
    raise AttributeError(name)


class Handle(tuple):
    """The eleven parts, and what they mean. Not to be changed by anybody, nor to be put together anew."""

    def bind(self, buffer: HybridEPBuffer, rows: Rows, pad_multiple: int) -> Handle:
        # The real one does not keep its buffer either.
        self._buffer = weakref.ref(buffer)
        self.rows, self.pad_multiple = rows, pad_multiple
        self._frozen = [part.clone() if isinstance(part, Tensor) else part for part in self]
        HANDLES.add(rows)
        return self

    def check(self, buffer: HybridEPBuffer) -> Rows:
        require(self._buffer() is buffer, "a handle of another buffer")
        for part, before in zip(self, self._frozen, strict=True):
            same = torch.equal(part, before) if isinstance(part, Tensor) else part is before
            require(same, "the handle was changed")
        return self.rows


class HybridEpConfigInstance:
    """What kernels were compiled for; part of a handle."""


class HybridEPBuffer:
    def __init__(
        self,
        group: ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        require(torch._C._current_graph_task_id() == -1, "a buffer is built in the middle of a backward pass")
        size = dist.get_world_size(group)
        require(hidden_dim % 16 == 0, "hidden_dim % 16 == 0")
        require(num_local_experts * size % 4 == 0, "(num_of_experts_per_rank * num_of_ranks_per_node) % 4 == 0")
        require(num_local_experts <= 1024, "pad_tokens_per_expert_kernel<<<1, num_experts>>>")
        self.ranks = Checked(group)
        sizes = (size, hidden_dim, max_num_of_tokens_per_rank, num_local_experts)
        self.ranks.check("build buffer", sizes=sizes)
        self.hidden_dim, self.num_local_experts = hidden_dim, num_local_experts
        self.capacity = max(max_num_of_tokens_per_rank, _SMALLEST_BUFFER)
        self.config = HybridEpConfigInstance()
        ALIVE.add(self)
        BUILT.append(sizes)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, None, Tensor | None, tuple]:
        unused = (scaling_factor, num_of_experts_per_rank, use_fp8, num_dispatched_tokens, use_host_meta)
        _only_what_is_emulated(non_blocking, fuse_permute_dispatch, *unused)
        self._check(hidden)
        if handle is None:
            if routing_map is None and topk_idx is not None:
                routing_map, probs = _indices_to_map(topk_idx, topk_weights, num_of_experts)
            handle = self._layout(hidden, routing_map, pad_multiple or 0)
            layout, operation = handle.rows, "dispatch"
            counts = layout.counts.clone()
        else:
            layout, operation = handle.check(self), "cached dispatch"
            counts = None
            require(num_permuted_tokens is not None, "TypeError: HandleImpl.num_permuted_tokens is an int, not None")
            require(num_permuted_tokens == layout.num_rows, "num_permuted_tokens: rows written past the end, or never")
            require(len(hidden) == layout.num_tokens, "This handle could be invalid.")
            require(pad_multiple in (None, 0, handle.pad_multiple), "another pad_multiple than the layout's")
        if probs is not None:
            _check_probs(probs, (layout.num_tokens, layout.num_experts))
        self.ranks.check(operation, with_probs=probs is not None)
        # Gaps are zeroed only by who is told of the padding.
        gaps = 0.0 if pad_multiple else float("nan")
        rows = layout.there(hidden[layout.token], gaps)
        weights = None if probs is None else layout.there(probs[layout.token, layout.expert], gaps)
        started(operation, [rows, weights], [hidden, probs], is_async=False)
        return rows, weights, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert handle is not None, "The handle is necessary in the combine pass."
        _only_what_is_emulated(fuse_unpermute_combine, num_dispatched_tokens)
        layout = handle.check(self)
        self._check(hidden)
        require(len(hidden) == layout.num_rows, "hidden.size(0) == num_permuted_tokens")
        if probs is not None:
            _check_probs(probs, (layout.num_rows,))
        self.ranks.check("combine", with_probs=probs is not None)
        combined, dense = layout.summed(hidden), None
        if probs is not None:
            dense = torch.zeros(layout.num_tokens, layout.num_experts)
            dense[layout.token, layout.expert] = layout.back(probs)
        started("combine", [combined, dense], [hidden, probs], is_async=False)
        return combined, dense

    def _layout(self, hidden: Tensor, routing_map: Tensor | None, pad_multiple: int) -> Handle:
        require(routing_map is not None, "the routing of the first dispatch")
        require(routing_map.dtype == torch.bool and routing_map.is_contiguous(), "routing_map: contiguous bool")
        num_tokens, num_experts = routing_map.shape
        require(len(hidden) == num_tokens, "hidden and routing_map have the same row number")
        require(num_experts == self.num_local_experts * self.ranks.size, "num_of_expert == experts of all ranks")
        require(num_tokens > 0, "a chunk of no tokens")
        require(num_tokens <= self.capacity, "the buffer is reallocated under every handle in flight")
        require(num_tokens % _TOKENS_IN_CHUNK * self.ranks.size % 4 == 0, "TMA 16B alignment error")
        # The routing of all ranks is gathered into one tensor of T rows a rank.
        self.ranks.check("layout", num_tokens=num_tokens, pad_multiple=pad_multiple)
        expert, token = routing_map.t().nonzero().unbind(1)
        rows = Rows.of(self.ranks, num_tokens, token, expert, num_experts, max(pad_multiple, 1))
        everywhere = num_tokens * self.ranks.size
        empty = torch.empty(0)
        parts = (
            torch.zeros(num_tokens, self.ranks.size, dtype=torch.int32),
            torch.zeros((num_tokens + 15) // 16 * 16, 1, dtype=torch.bool),
            torch.zeros(num_tokens, 0, dtype=torch.bool),
            torch.tensor([rows.num_rows], dtype=torch.int32),
            torch.zeros(everywhere, self.num_local_experts, dtype=torch.bool),
            empty.int(),
            torch.zeros(everywhere, self.num_local_experts, dtype=torch.int32),
            rows.counts.int(),
            num_tokens,
            self.config,
            torch.zeros(1, dtype=torch.int32),
        )
        return Handle(parts).bind(self, rows, pad_multiple)

    def _check(self, hidden: Tensor) -> None:
        check_tokens(hidden, precision.allowed())
        require(hidden.shape[1] == self.hidden_dim, "hidden_dim")


def buffers_left() -> int:
    """Buffers that nobody destroyed. There is no `destroy`: they go when they are forgotten."""
    gc.collect()
    return len(ALIVE)


def _indices_to_map(topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor | None]:
    require(bool((topk_idx >= 0).all()), "scatter: index -1 is out of bounds")
    shape = (len(topk_idx), num_experts)
    routing_map = torch.zeros(shape, dtype=torch.bool).scatter(1, topk_idx.long(), True)
    probs = None if topk_weights is None else torch.zeros(shape).scatter(1, topk_idx.long(), topk_weights)
    return routing_map, probs


def _check_probs(probs: Tensor, shape: tuple[int, ...]) -> None:
    require(probs.is_contiguous() and tuple(probs.shape) == shape, f"probs: contiguous {shape}")
    require(probs.dtype == torch.float32, "probs.value().dtype() == torch::kFloat32")


def _only_what_is_emulated(*asked_for: object) -> None:
    if any(asked_for):
        raise EmulationError("this way of calling HybridEP is not emulated")
