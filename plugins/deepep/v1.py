"""DeepEP 1.2.1, `Buffer`: a token goes once to each rank that needs it, by NVLink inside a node and RDMA across.

What is not obvious:

- The list of counts costs the host a wait; there is no way around it but worst-case buffers.
- `combine` adds up and weights nothing. It adds the weights of all ranks too, so gradients at slots of other ranks must
  be zero, which `rows.local_rows` sees to.
- A handle works only with the configuration it was made with: both are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from expertmesh_plugins.deepep.buffers import shared_buffer
from expertmesh_plugins.deepep.engine import load, unavailable, unsuitable
from expertmesh_plugins.deepep.nobody import somebody
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.requirements import is_older_than_hopper, refuse_late
from expertmesh.dispatch.transport import Route, Situation, Transfer, Transport

# Up to so many ranks it takes to be on one node, and joined by NVLink; of more, the first so many, the next, ...
_NODE = 8
# Where kernels are instantiated.
_INSIDE_NODE = (2, 4, 8)
_ACROSS_NODES = (16, 32, 64, 128, 144, 160)


@dataclass
class Sent:
    """What the first dispatch left.

    Attributes:
        handle: DeepEP's own.
        weights: `[received, top_k]` float32, zero at slots of other ranks.
        local_ids: `[received, top_k]` int64, -1 at slots of other ranks.
    """

    handle: tuple
    weights: Tensor
    local_ids: Tensor

    def transfer(self, tokens: Tensor, event: Any, is_routed: bool) -> Transfer:
        """Tokens that travel along the handle, as `Transport.send` returns them."""
        routing = (self.weights.detach(), self.local_ids.detach()) if is_routed else (None, None)
        return Transfer((tokens, *routing), event.current_stream_wait)


class DeepEPV1(Transport):
    """See the module's docstring."""

    def __init__(self, ep_mesh: DeviceMesh, situation: Situation) -> None:
        super().__init__(ep_mesh, situation)
        self._engine = load()
        self._dispatch_config = self._engine.Buffer.get_dispatch_config(situation.ep_size)
        self._combine_config = self._engine.Buffer.get_combine_config(situation.ep_size)
        self._buffer = shared_buffer(("Buffer", situation.hidden, situation.dtype), ep_mesh, self._build)

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """See `Transport.refusal`."""
        return unavailable("Buffer") or unsuitable(situation) or _too_large(situation) or _misplaced(situation)

    def plan(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Route:
        """See `Transport.plan`. Sends the tokens too.

        Raises:
            ConfigError: see `refuse_late`.
        """
        refuse_late("deepep", self.situation, hidden, unsuitable)
        num_tokens = hidden.shape[0]
        hidden, top_k_index, top_k_weights = somebody(hidden, top_k_index, top_k_weights)
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            top_k_index, self.situation.num_experts
        )
        tokens, local_ids, weights, counts, handle, event = self._buffer.dispatch(
            hidden,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=top_k_index,
            topk_weights=top_k_weights,
            config=self._dispatch_config,
            **self._on_comm_stream(),
        )
        sent = Sent(handle, weights, local_ids)
        # From pinned memory, so that the host does not wait once more.
        on_device = torch.tensor(counts, pin_memory=hidden.is_cuda).to(hidden.device, non_blocking=True)
        return Route(num_tokens, on_device, counts, sent, sent.transfer(tokens, event, is_routed=True))

    def send(self, route: Route, hidden: Tensor, routing: tuple[Tensor, Tensor] | None) -> Transfer:
        """See `Transport.send`. Along the handle, without counts and without a wait."""
        sent: Sent = route.handle
        tokens, *_, event = self._buffer.dispatch(
            *somebody(hidden), handle=sent.handle, config=self._dispatch_config, **self._on_comm_stream()
        )
        return sent.transfer(tokens, event, is_routed=routing is not None)

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Transport.received`."""
        tokens, weights, local_ids = tensors
        return tokens, weights, local_ids.masked_fill(local_ids < 0, self.situation.num_local_experts)

    def send_back(self, route: Route, rows: Tensor, weights: Tensor | None) -> Transfer:
        """See `Transport.send_back`."""
        hidden, weights, event = self._buffer.combine(
            rows,
            route.handle.handle,
            topk_weights=weights,
            config=self._combine_config,
            **self._on_comm_stream(),
        )
        size = route.num_tokens
        return Transfer((hidden[:size], weights if weights is None else weights[:size]), event.current_stream_wait)

    def _on_comm_stream(self) -> dict[str, Any]:
        """Start behind what this stream has been given so far, and let it go on."""
        return dict(previous_event=self._buffer.capture(), async_finish=True, allocate_on_comm_stream=True)

    def _build(self) -> Any:
        situation = self.situation
        # DeepEP counts at least two bytes a feature.
        width = situation.hidden * max((situation.dtype or torch.bfloat16).itemsize, 2)
        configs = (self._dispatch_config, self._combine_config)
        return self._engine.Buffer(
            self.ep_mesh.get_group(),
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(width, situation.ep_size) for config in configs),
            num_rdma_bytes=max(config.get_rdma_buffer_size_hint(width, situation.ep_size) for config in configs),
            explicitly_destroy=True,
        )


def _too_large(situation: Situation) -> str | None:
    inside = situation.ep_size <= _NODE
    sizes = _INSIDE_NODE if inside else _ACROSS_NODES
    if situation.ep_size not in sizes:
        return f"it has no kernels for an ep_size of {situation.ep_size}: set ep_size to one of {sizes}."
    limit = 128 if inside else 1024
    if situation.num_local_experts > limit:
        return f"it takes {limit} experts a rank, and {situation.num_local_experts} are: raise ep_size."
    limit = 8184 if inside else 8144
    if situation.hidden > limit or situation.hidden % 128:
        return (
            f"it takes a hidden size up to {limit} that is a multiple of 128, and this is {situation.hidden}: choose "
            f"another dispatcher."
        )
    return None


def _misplaced(situation: Situation) -> str | None:
    """On nodes or GPUs that its kernels do not serve."""
    size, node = situation.ep_size, situation.ranks_per_node
    if size <= _NODE and not situation.is_inside_node:
        return (
            f"up to {_NODE} ranks must be on one node, and an EP group of {size} is on several, with {node} each: "
            f"choose an ep_size that divides {node}, or use all_to_all."
        )
    if size > _NODE and node is not None and node % _NODE:
        return f"across nodes it takes {_NODE} ranks of each, and a node has {node}: use all_to_all."
    needs_hopper = load().Buffer.is_sm90_compiled()
    if size > _NODE and not needs_hopper:
        return f"built with DISABLE_SM90_FEATURES it reaches {_NODE} ranks: build it without, or lower ep_size."
    if needs_hopper and is_older_than_hopper(situation):
        return (
            "it was built for GPUs of compute capability 9.0 (Hopper) or newer: build it with "
            "DISABLE_SM90_FEATURES=1, or use all_to_all."
        )
    return None
