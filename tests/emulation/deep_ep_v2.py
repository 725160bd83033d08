"""DeepEP 2.1.0's `ElasticBuffer`, as far as it is used: bfloat16, one NVLink domain, training."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from emulation import precision
from emulation.collective import Checked
from emulation.errors import EmulationError, require
from emulation.events import GARBAGE, Event, started
from emulation.handles import Life
from emulation.rows import Rows
from emulation.traffic import Traffic, check_routing, check_tokens, check_weights

__version__ = "2.1.0"
DEVICE_TYPES = ("cpu",)
topk_idx_t = torch.int64
ALIVE: weakref.WeakSet[ElasticBuffer] = weakref.WeakSet()
# One buffer a layer made the real engine fail at the 28th.
MOST_BUFFERS = 28
_ORDER = torch.Generator().manual_seed(1)
# Two numbers of a compiled kernel's key; more of them are a storm of recompilations.
COMPILED: set[tuple] = set()


def __getattr__(name: str) -> object:
    if name == "DTYPES":
        return precision.allowed()
    raise AttributeError(name)


class EventHandle(Event):
    def current_stream_wait(self) -> None:
        self.wait()


class EventOverlap:
    def __init__(self, event: Event | None = None) -> None:
        self.event = event

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.event is not None
        self.event.wait()


@dataclass(eq=False)
class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    # What follows is the emulation's.
    buffer: ElasticBuffer | None = None
    traffic: Traffic | None = None
    rows: Rows | None = None
    order: Tensor | None = None
    frozen: list[Tensor] = field(default_factory=list)
    life: Life = field(default_factory=Life)

    def tensors(self) -> list[Tensor]:
        return [self.topk_idx, self.psum_num_recv_tokens_per_expert, self.recv_src_metadata]

    def check(self, buffer: ElasticBuffer) -> None:
        require(self.buffer is buffer, "a handle of another buffer")
        require(all(map(torch.equal, self.tensors(), self.frozen)), "the handle's tensors were changed")


class ElasticBuffer:
    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        require(torch._C._current_graph_task_id() == -1, "a buffer is built in the middle of a backward pass")
        self.ranks = Checked(group)
        self.group, self.rank_idx, self.num_ranks = group, self.ranks.rank, self.ranks.size
        self.ranks.check("build buffer", num_max_tokens=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk)
        sizes = (num_max_tokens_per_rank, hidden, num_topk)
        options = (use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction)
        self.num_bytes = num_bytes or self.get_buffer_size_hint(group, *sizes, *options)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or 24
        self.deterministic = deterministic
        self.allow_multiple_reduction = allow_multiple_reduction
        self.explicitly_destroy = explicitly_destroy
        self.alive = True
        ALIVE.add(self)
        require(sum(buffer.alive for buffer in ALIVE) < MOST_BUFFERS, "ncclDevCommCreate: out of resources")

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        require(self.alive, "destroyed twice")
        require(dist.is_initialized(), "a buffer is destroyed after its process group")
        self.ranks.check("destroy buffer")
        self.alive = False
        ALIVE.discard(self)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        self.ranks.check("barrier")

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        size, top_k = dist.get_world_size(group), num_topk or 32
        there = size * (2 * hidden + (12 * top_k + 4 + 31) // 32 * 32)
        back = min(size, top_k) * (2 * hidden + (8 * top_k + 31) // 32 * 32)
        return (num_max_tokens_per_rank * (there + back) + 2**21 - 1) // 2**21 * 2**21

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        assert num_experts % self.num_ranks == 0
        return 20

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return num_sms + 1

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        self._check_call(x)
        self._check_streams(previous_event, allocate_on_comm_stream)
        do_cpu_sync = handle is None if do_cpu_sync is None else do_cpu_sync
        if handle is None:
            num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
            handle = self._plan(
                x, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, expert_alignment or 1, num_sms,
                do_expand, do_cpu_sync,
            )  # fmt: skip
            label = "dispatch"
        else:
            self._check_replay(x, handle, num_sms, do_expand, num_max_tokens_per_rank, expert_alignment)
            require(cumulative_local_expert_recv_stats is None, "statistics of a cached dispatch")
            require(topk_idx is None, "topk_idx of a cached dispatch")
            label = "cached dispatch"
        COMPILED.add((label, handle.num_max_tokens_per_rank, x.shape[1], num_sms, handle.expert_alignment))
        if topk_weights is not None:
            check_weights(topk_weights, tuple(handle.topk_idx.shape))
        self.ranks.check(label, hidden=x.shape[1], expand=do_expand, weighted=topk_weights is not None)
        bring = self._expanded if do_expand else self._compact
        received, ids, weights = bring(x, topk_weights, handle, do_cpu_sync, do_zero_padding)
        event = started(label, [received, ids, weights], [x, topk_weights], async_with_compute_stream)
        return received, ids, weights, handle, EventOverlap(event)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._check_call(x)
        self._check_streams(previous_event, allocate_on_comm_stream)
        handle.check(self)
        require(bias is None, "bias is not emulated")
        self.ranks.check("combine", hidden=x.shape[1], weighted=topk_weights is not None)
        collect = self._combine_rows if handle.do_expand else self._combine_tokens
        combined, weights = collect(x, topk_weights, handle)
        event = started("combine", [combined, weights], [x, topk_weights], async_with_compute_stream)
        return combined, weights, EventOverlap(event)

    def _plan(
        self, x, topk_idx, topk_weights, num_experts, num_max_tokens, alignment, num_sms, do_expand, do_cpu_sync
    ) -> EPHandle:
        require(num_experts is not None and num_experts % self.num_ranks == 0, "num_experts % num_ranks == 0")
        num_max_tokens = num_max_tokens or self.num_max_tokens_per_rank
        require(num_max_tokens == self.num_max_tokens_per_rank, "another capacity than the buffer's: recompiles")
        require(x.shape[0] <= num_max_tokens, "num_tokens <= num_max_tokens_per_rank")
        require(num_sms % 2 == 0 and num_sms >= 4, "num_sms")
        check_routing(x, topk_idx, topk_weights, num_experts)
        num_local = num_experts // self.num_ranks
        require(self.num_ranks + num_local <= 128, "num_scaleup_ranks + num_experts_per_rank <= 128")
        self.ranks.check("plan", experts=num_experts, capacity=num_max_tokens, alignment=alignment, expand=do_expand)
        traffic = Traffic.of(self.ranks, topk_idx, num_experts)
        picked = topk_idx >= 0
        expert, order = topk_idx[picked].sort(stable=True)
        token = torch.arange(len(topk_idx)).unsqueeze(1).expand_as(topk_idx)[picked][order]
        rows = Rows.of(self.ranks, len(topk_idx), token, expert, num_experts, alignment)
        ids = traffic.local_ids(traffic.there(topk_idx), num_experts)
        real = torch.bincount(ids[ids >= 0], minlength=num_local)
        ends = rows.counts.cumsum(0)
        # The docstring of the real one: the aligned start of an expert and its own rows.
        psum = (ends - rows.counts + real).int()
        shuffled = torch.arange(traffic.num_received)
        if not self.deterministic:
            shuffled = torch.randperm(traffic.num_received, generator=_ORDER)
        most_rows = self._most_rows(num_max_tokens, topk_idx, num_local, alignment)
        handle = EPHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=num_max_tokens,
            num_sms=num_sms,
            topk_idx=topk_idx.clone(),
            num_recv_tokens=traffic.num_received if do_cpu_sync else num_max_tokens * self.num_ranks,
            num_expanded_tokens=rows.num_rows if do_cpu_sync else most_rows,
            num_recv_tokens_per_expert_list=rows.counts.tolist() if do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(traffic.recv_sizes).cumsum(0).int(),
            psum_num_recv_tokens_per_expert=psum,
            num_unaligned_recv_tokens_per_expert=real.int(),
            recv_src_metadata=torch.zeros(traffic.num_received, topk_idx.shape[1] + 2, dtype=torch.int32),
            dst_buffer_slot_idx=torch.zeros(topk_idx.shape, dtype=torch.int32),
            buffer=self,
            traffic=traffic,
            rows=rows,
            order=shuffled,
        )  # fmt: skip
        handle.frozen = [tensor.clone() for tensor in handle.tensors()]
        return handle

    def _most_rows(self, num_max_tokens: int, topk_idx: Tensor, num_local: int, alignment: int) -> int:
        rows = num_max_tokens * self.num_ranks * min(topk_idx.shape[1], num_local) + num_local * (alignment - 1)
        return (rows + alignment - 1) // alignment * alignment

    def _compact(self, x, topk_weights, handle, do_cpu_sync, do_zero_padding):
        traffic, size = handle.traffic, handle.num_recv_tokens
        ids = traffic.local_ids(traffic.there(handle.topk_idx), handle.num_experts)
        # Weights at other ranks' slots come as they were.
        weights = None if topk_weights is None else _with_tail(traffic.there(topk_weights)[handle.order], size)
        received = _with_tail(traffic.there(x)[handle.order], size)
        return received, _with_tail(ids[handle.order], size), weights

    def _expanded(self, x, topk_weights, handle, do_cpu_sync, do_zero_padding):
        rows, size = handle.rows, handle.num_expanded_tokens
        gap = 0.0 if do_zero_padding else float("nan")
        weights = None
        if topk_weights is not None:
            # The slot of each sent pair among its token's choices.
            slot = (handle.topk_idx[rows.token] == rows.expert.unsqueeze(1)).int().argmax(1)
            weights = _with_tail(rows.there(topk_weights[rows.token, slot], float("nan")), size)
        return _with_tail(rows.there(x[rows.token], gap), size), None, weights

    def _combine_tokens(self, x, topk_weights, handle):
        traffic = handle.traffic
        require(x.shape[0] == handle.num_recv_tokens, "x.size(0) == num_recv_tokens")
        restored = torch.empty_like(handle.order)
        restored[handle.order] = torch.arange(len(handle.order))
        combined, weights = traffic.back(x[: traffic.num_received][restored]), None
        if topk_weights is not None:
            require(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "topk_weights: float32")
            require(tuple(topk_weights.shape) == (x.shape[0], handle.topk_idx.shape[1]), "topk_weights: [N, K]")
            weights = traffic.picked_back(topk_weights[: traffic.num_received][restored])
        return combined, weights

    def _combine_rows(self, x, topk_weights, handle):
        rows = handle.rows
        require(x.shape[0] == handle.num_expanded_tokens, "x.size(0) == num_expanded_tokens")
        returned = rows.back(x)
        combined = torch.zeros(rows.num_tokens, x.shape[1]).index_add_(0, rows.token, returned.float()).to(x.dtype)
        weights = None
        if topk_weights is not None:
            require(self.allow_multiple_reduction, "device assert: topk_weights == nullptr")
            require(topk_weights.dtype == torch.float32 and topk_weights.dim() == 1, "topk_weights: float32, 1D")
            require(topk_weights.shape[0] == x.shape[0], "topk_weights: [N_expanded]")
            weights = torch.zeros(handle.topk_idx.shape)
            slot = (handle.topk_idx[rows.token] == rows.expert.unsqueeze(1)).int().argmax(1)
            weights[rows.token, slot] = rows.back(topk_weights)
        return combined, weights

    def _check_replay(self, x, handle, num_sms, do_expand, num_max_tokens, alignment) -> None:
        if num_sms == 0:
            raise TypeError("unsupported operand type(s) for %: 'NoneType' and 'int'")
        handle.check(self)
        require(num_sms == handle.num_sms, "num_sms == handle.num_sms")
        require(do_expand == handle.do_expand, "do_expand is not inherited from the handle")
        require(num_max_tokens in (None, handle.num_max_tokens_per_rank), "num_max_tokens_per_rank of the handle")
        require(alignment in (None, handle.expert_alignment), "expert_alignment of the handle")
        require(x.shape[0] == handle.topk_idx.shape[0], "num_tokens == handle.topk_idx.size(0)")

    def _check_call(self, x: Tensor) -> None:
        require(self.alive, "the buffer was destroyed")
        check_tokens(x, precision.allowed())
        require(x.shape[1] % 256 == 0, "static_assert(kHidden % 256 == 0)")
        if torch.are_deterministic_algorithms_enabled():
            require(not torch.utils.deterministic.fill_uninitialized_memory, "fill_uninitialized_memory")

    @staticmethod
    def _check_streams(previous: EventHandle | None, allocate_on_comm_stream: bool) -> None:
        if previous is not None and not isinstance(previous, EventHandle):
            raise TypeError(f"previous_event: EventHandle, not {type(previous).__name__}")
        require(previous is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")


def _with_tail(rows: Tensor, size: int) -> Tensor:
    """Behind the real ones what happened to be there."""
    if size < rows.shape[0]:
        raise EmulationError(f"{rows.shape[0]} rows in a buffer of {size}")
    whole = rows.new_full((size, *rows.shape[1:]), float("nan") if rows.is_floating_point() else GARBAGE)
    whole[: rows.shape[0]] = rows
    return whole
