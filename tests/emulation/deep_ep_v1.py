"""DeepEP 1.2.1's `Buffer`, as far as it is used: intranode, bfloat16, without low latency."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from emulation import precision
from emulation.collective import Checked
from emulation.errors import EmulationError, require
from emulation.events import Event, started
from emulation.handles import Life
from emulation.traffic import Traffic, check_routing, check_tokens, check_weights

__version__ = "1.2.1"
DEVICE_TYPES = ("cpu",)
CONFIGURED = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
ALIVE: weakref.WeakSet[Buffer] = weakref.WeakSet()
BUILT: list[tuple] = []


def __getattr__(name: str) -> object:
    if name == "DTYPES":
        return precision.allowed()
    raise AttributeError(name)


class EventHandle(Event):
    """Recorded on the current stream when constructed."""

    def current_stream_wait(self) -> None:
        self.wait()


class EventOverlap:
    def __init__(self, event: Event | None = None, extra_tensors: tuple | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.wait()


class Config:
    def __init__(
        self,
        num_sms: int,
        num_max_nvl_chunked_send_tokens: int,
        num_max_nvl_chunked_recv_tokens: int,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms
        self._recv = num_max_nvl_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        size = self.num_sms // 2 * min(num_ranks, 8) * self._recv * (hidden_bytes + 160)
        return (size + 127) // 128 * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)


class Handle(tuple):
    """Six tensors, and what they mean. Not to be changed by anybody."""

    def bind(self, buffer: Buffer, traffic: Traffic, num_sms: int) -> Handle:
        self.buffer, self.traffic, self.num_sms = buffer, traffic, num_sms
        self._frozen = [tensor.clone() for tensor in self]
        self._life = Life()
        return self

    def check(self, buffer: Buffer, num_sms: int) -> Traffic:
        require(self.buffer is buffer, "a handle of another buffer")
        require(self.num_sms == num_sms, "channel_prefix_matrix.size(1) == num_channels")
        require(all(map(torch.equal, self, self._frozen)), "the handle's tensors were changed")
        return self.traffic


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: object = None,
    ) -> None:
        require(torch._C._current_graph_task_id() == -1, "a buffer is built in the middle of a backward pass")
        require(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "num_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0")
        size = dist.get_world_size(group)
        require(size in (2, 4, 8) or size % 8 == 0, f"Unsupported ranks {size}")
        self.ranks = Checked(group)
        self.ranks.check("build buffer", num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        self.alive = True
        ALIVE.add(self)
        BUILT.append((size, num_nvl_bytes, num_rdma_bytes))

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        require(self.alive, "destroyed twice")
        require(dist.is_initialized(), "a buffer is destroyed after its process group")
        self.ranks.check("destroy buffer")
        self.alive = False
        ALIVE.discard(self)

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in CONFIGURED, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 24, 256)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in CONFIGURED, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 10, 256)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        self._check_streams(previous_event, async_finish, allocate_on_comm_stream)
        check_routing(topk_idx, topk_idx, None, num_experts)
        require(num_experts % self.ranks.size == 0, "num_experts % num_ranks == 0")
        slots = torch.where(topk_idx >= 0, topk_idx, num_experts)
        picked = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool).scatter_(1, slots, True)[:, :-1]
        in_rank = picked.view(len(topk_idx), self.ranks.size, num_experts // self.ranks.size).any(2)
        outputs = in_rank.sum(0).int(), picked.sum(0).int(), in_rank
        event = started("layout", outputs, [topk_idx], async_finish)
        return outputs[0], None, outputs[1], outputs[2], EventOverlap(event)

    def dispatch(
        self,
        x: Tensor,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        config = config or self.get_dispatch_config(self.ranks.size)
        self._check_call(x, config)
        self._check_streams(previous_event, async_finish, allocate_on_comm_stream)
        if num_worst_tokens:
            raise EmulationError("num_worst_tokens is not emulated")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            traffic = handle.check(self, config.num_sms)
            require(x.shape[0] == traffic.num_tokens, "is_token_in_rank.size(0) == x.size(0)")
            self.ranks.check("cached dispatch", hidden=x.shape[1])
            received = traffic.there(x)
            event = started("cached dispatch", [received], [x], async_finish)
            return received, None, None, None, None, EventOverlap(event)
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        require((topk_idx is None) == (topk_weights is None), "topk_idx.has_value() == topk_weights.has_value()")
        num_experts = num_tokens_per_expert.numel()
        require(num_experts // self.ranks.size <= 128, "num_experts_per_rank <= 128 threads")
        check_routing(x, topk_idx, topk_weights, num_experts)
        self.ranks.check(
            "dispatch", experts=num_experts, top_k=topk_idx.shape[1], hidden=x.shape[1], alignment=expert_alignment
        )
        traffic = Traffic.of(self.ranks, topk_idx, num_experts)
        require(torch.equal(num_tokens_per_rank.long(), torch.tensor(traffic.send_sizes)), "another layout's counts")
        received = traffic.there(x)
        local_ids = traffic.local_ids(traffic.there(topk_idx), num_experts)
        weights = torch.where(local_ids >= 0, traffic.there(topk_weights), 0)
        counts = torch.bincount(local_ids[local_ids >= 0], minlength=num_experts // self.ranks.size)
        aligned = ((counts + expert_alignment - 1) // expert_alignment * expert_alignment).tolist()
        new = self._handle(traffic, is_token_in_rank, config.num_sms)
        event = started("dispatch", [received, local_ids, weights], [x, topk_idx, topk_weights], async_finish)
        return received, local_ids, weights, aligned, new, EventOverlap(event)

    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        config = config or self.get_combine_config(self.ranks.size)
        self._check_call(x, config)
        self._check_streams(previous_event, async_finish, allocate_on_comm_stream)
        if bias is not None:
            raise EmulationError("bias is not emulated")
        traffic = handle.check(self, config.num_sms)
        require(x.shape[0] == traffic.num_received, "src_idx.size(0) == num_tokens")
        self.ranks.check("combine", hidden=x.shape[1], weighted=topk_weights is not None)
        combined, weights = traffic.back(x), None
        if topk_weights is not None:
            check_weights(topk_weights, (traffic.num_received, traffic.owner.shape[1]))
            # Added up over ranks: what is not zero at another rank's slot would be added too.
            weights = traffic.back(topk_weights)
        event = started("combine", [combined, weights], [x, topk_weights], async_finish)
        return combined, weights, EventOverlap(event)

    def _handle(self, traffic: Traffic, is_token_in_rank: Tensor, num_sms: int) -> Handle:
        size, channels = self.ranks.size, num_sms // 2
        matrices = [torch.zeros(size, width, dtype=torch.int32) for width in (size, channels, channels)]
        source = torch.zeros(traffic.num_received, dtype=torch.int32)
        head = torch.zeros(traffic.num_tokens, size, dtype=torch.int32)
        return Handle((*matrices, source, is_token_in_rank, head)).bind(self, traffic, num_sms)

    def _check_call(self, x: Tensor, config: Config) -> None:
        require(self.alive, "the buffer was destroyed")
        check_tokens(x, precision.allowed())
        require(x.shape[1] <= 8184, "hidden > 8184: the kernel's staging buffer overflows")
        require(x.shape[1] % 128 == 0, "hidden % 128: wrong numbers before #413")
        needed = config.get_nvl_buffer_size_hint(x.shape[1] * max(x.element_size(), 2), self.ranks.size)
        require(self.num_nvl_bytes >= needed, f"num_nvl_bytes {self.num_nvl_bytes} < {needed}")

    @staticmethod
    def _check_streams(previous: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        require(previous is None or isinstance(previous, EventOverlap), "previous_event: EventOverlap")
        if allocate_on_comm_stream:
            require(previous is not None and async_finish, "previous_event.has_value() and async")
