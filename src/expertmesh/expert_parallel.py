"""Turning one experts module into its expert-parallel self: shard its parameters, replace its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from expertmesh.adapters import AdapterParameter, ExpertAdapters
from expertmesh.compute import ExpertCompute, choose_compute
from expertmesh.compute.normed import normed_experts
from expertmesh.compute.projection import ProjectionTensors
from expertmesh.compute.routed import ExpertTensors
from expertmesh.config import ExpertParallelConfig
from expertmesh.dispatch import Dispatched, TokenDispatcher, build_dispatcher
from expertmesh.dispatch.topology import ranks_per_node, topology
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ModelError
from expertmesh.experts import ExpertsSpec
from expertmesh.host_memory import untouched
from expertmesh.mesh import ExpertMesh
from expertmesh.recompute import recompute_experts

# A route is no tensor, and what arrives has sizes that no compiler knows: compiled blocks are cut here. What is called
# from here is compiled again: the experts' arithmetic, but not what a dispatcher does.
_AROUND_DISPATCH = torch.compiler.disable(recursive=False, reason="tokens travel between ranks")


class ExpertParallelForward:
    """The forward of an expert-parallel experts module: dispatch, compute, combine.

    Takes what the module's own forward took, `(hidden_states [tokens, hidden], top_k_index [tokens, top_k],
    top_k_weights [tokens, top_k])` with global expert ids, and returns `[tokens, hidden]`.

    Raises:
        ModelError: the hidden states are not a matrix of tokens.
    """

    def __init__(
        self, experts: nn.Module, plan: ExpertPlan, compute: ExpertCompute, compute_dtype: torch.dtype | None
    ) -> None:
        self.experts = experts
        self.plan = plan
        self.compute = compute
        self.compute_dtype = compute_dtype

    @_AROUND_DISPATCH
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden_states.ndim != 2:
            raise ModelError(
                f"{type(self.experts).__name__} was called with hidden states of shape {tuple(hidden_states.shape)}; "
                f"expert parallelism needs [tokens, hidden]."
            )
        device_type = hidden_states.device.type
        tokens = hidden_states.to(self._dtype_on(device_type, hidden_states.dtype))
        # Autocast would cover the GEMMs of the forward and not those of the hand-written backward.
        with torch.autocast(device_type, enabled=False):
            inputs = tokens, top_k_index.long(), top_k_weights
            if self.plan.recomputes and torch.is_grad_enabled():
                output = recompute_experts(self._exchange_and_compute, *inputs)
            else:
                output = self._exchange_and_compute(*inputs)
        return output.to(hidden_states.dtype)

    @_AROUND_DISPATCH
    def _exchange_and_compute(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """All parts of the batch are on their way before the first is waited for; results return under the next part's
        computation. Every rank has the same number of parts, some perhaps empty.
        """
        dispatcher, parts = self.plan.dispatcher, self.plan.chunks
        batch = (tokens, top_k_index, top_k_weights)
        cut = zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True) if parts > 1 else (batch,)
        leaving = [dispatcher.start_dispatch(*part) for part in cut]
        returning = []
        for started in leaving:
            dispatched = dispatcher.finish_dispatch(started)
            returning.append(dispatcher.start_combine(self._compute(dispatched), dispatched.state))
        outputs = [dispatcher.finish_combine(started) for started in returning]
        return outputs[0] if parts == 1 else torch.cat(outputs)

    @_AROUND_DISPATCH
    def _compute(self, dispatched: Dispatched) -> Tensor:
        operands = (self._local_tensors(), dispatched.tokens, dispatched.row_weights, dispatched.rows)
        if self.plan.spec.has_post_expert_norm:
            return normed_experts(self.compute, *operands, self.experts.post_expert_norm)
        return self.compute(*operands)

    def _dtype_on(self, device_type: str, default: torch.dtype) -> torch.dtype:
        if self.compute_dtype is not None:
            return self.compute_dtype
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else default

    def _local_tensors(self) -> ExpertTensors:
        # FSDP2 swaps the attribute between its sharded and its gathered form, so it is looked up at every call.
        local = {name: _local(getattr(self.experts, name)) for name in self.plan.spec.parameter_names}
        adapters = self.plan.adapters.active() if self.plan.adapters is not None else {}
        return ExpertTensors(
            *(
                ProjectionTensors(local[name], local.get(f"{name}_bias"), adapters.get(name))
                for name in (self.plan.spec.up_name, "down_proj")
            )
        )


def _local(parameter: Tensor) -> Tensor:
    # Where Transformers calls us, it has put the local parts in place of its DTensors.
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True)
class Replaced:
    """A parameter of experts that was sharded: what it was, and where what it is now is to be found."""

    old: nn.Parameter
    owner: nn.Module
    name: str

    @property
    def new(self) -> nn.Parameter:
        """What the module has now: FSDP2 puts a Parameter of its own in place of the one it was given."""
        return getattr(self.owner, self.name)


def shard_by_expert(
    experts: nn.Module,
    spec: ExpertsSpec,
    mesh: ExpertMesh,
    device: torch.device,
    trainable_dtype: torch.dtype | None = None,
    adapters: ExpertAdapters | None = None,
) -> list[Replaced]:
    """Replace each routed parameter `[num_experts, ...]` by a DTensor of the same shape, `Shard(0)` on the `ep` axis.

    So are the parameters of adapters, with the experts outermost. A rank keeps (and moves to `device`) its own experts
    only. Gradient requirements are kept; parameters that have one are stored in `trainable_dtype` if it is given.
    """
    own = [AdapterParameter(experts, name, _same, _same) for name in spec.parameter_names]
    return [
        _shard(parameter, mesh, device, trainable_dtype)
        for parameter in (*own, *(adapters.parameters if adapters is not None else ()))
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _shard(
    parameter: AdapterParameter, mesh: ExpertMesh, device: torch.device, trainable_dtype: torch.dtype | None
) -> Replaced:
    old = getattr(parameter.owner, parameter.name)
    local = parameter.by_expert(old.detach()).chunk(mesh.ep.size(), dim=0)[mesh.ep.get_local_rank()]
    dtype = trainable_dtype if trainable_dtype is not None and old.requires_grad else old.dtype
    if getattr(old, "is_placeholder", False) and device.type == "cpu":
        local = untouched(local.shape, dtype)
    else:
        local = local.to(device, dtype, copy=True).contiguous()
    sharded = DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)
    new = nn.Parameter(sharded, requires_grad=old.requires_grad)
    setattr(parameter.owner, parameter.name, new)
    return Replaced(old, parameter.owner, parameter.name)


@dataclass(frozen=True)
class ExpertPlan:
    """How one experts module will work, decided before anything is touched.

    Attributes:
        spec: its layout.
        dispatcher: shared by all modules with the same situation.
        compute: what computes them.
        adapters: what wraps it.
        called: what the model calls for it: the module, or the outermost wrapper around it.
        chunks: parts of a batch that travel and are computed one under the other.
        recomputes: whether the experts are run again in the backward instead of keeping what they need.
    """

    spec: ExpertsSpec
    dispatcher: TokenDispatcher
    compute: type[ExpertCompute]
    adapters: ExpertAdapters | None
    called: nn.Module
    chunks: int
    recomputes: bool = False


def situation_of(
    experts: nn.Module, spec: ExpertsSpec, ep_size: int, device: torch.device, compute_dtype: torch.dtype | None
) -> Situation:
    """What one experts module asks of a dispatcher.

    Args:
        experts: the module, sharded or not.
        spec: its layout.
        ep_size: ranks that share it.
        device: where its weights are computed.
        compute_dtype: what tokens are sent in; the dtype of the weights by default.
    """
    return Situation(
        ep_size=ep_size,
        num_experts=spec.num_experts,
        hidden=experts.down_proj.shape[2 if spec.is_transposed else 1],
        dtype=compute_dtype or experts.down_proj.dtype,
        device=device,
        ranks_per_node=ranks_per_node(),
        topology=topology(device.type),
    )


def plan_experts(
    modules: Mapping[str, nn.Module],
    adapters: Mapping[str, ExpertAdapters],
    config: ExpertParallelConfig,
    mesh: ExpertMesh,
    device: torch.device,
    compute_dtype: torch.dtype | None,
) -> dict[str, ExpertPlan]:
    """Decide how every experts module will work. Nothing is touched.

    Raises:
        ConfigError: a dispatcher or compute that was asked for cannot be used.
    """
    dispatchers: dict[Situation, TokenDispatcher] = {}
    plans = {}
    for name, experts in modules.items():
        spec = ExpertsSpec.of(experts)
        situation = situation_of(experts, spec, mesh.ep.size(), device, compute_dtype)
        if situation not in dispatchers:
            dispatchers[situation] = build_dispatcher(config.ep_dispatcher, mesh.ep, situation)
        dispatcher = dispatchers[situation]
        compute = choose_compute(config.ep_compute, experts, spec, situation.dtype, device, dispatcher.counts_on_host)
        wrapping = adapters.get(name)
        called = experts if wrapping is None else wrapping.module
        recomputes = config.ep_activation_checkpointing == "experts_only"
        plans[name] = ExpertPlan(spec, dispatcher, compute, wrapping, called, config.ep_chunks, recomputes)
    return plans


def install_forward(
    experts: nn.Module, plan: ExpertPlan, gradient_scale: float, compute_dtype: torch.dtype | None
) -> None:
    """Give the experts module, or the outermost wrapper around it, its expert-parallel forward.

    Args:
        experts: already sharded by `shard_by_expert`.
        plan: how it works.
        gradient_scale: factor on the experts' gradients that nobody else applies.
        compute_dtype: what tokens are sent and multiplied in; by default autocast's dtype, or their own.
    """
    compute = plan.compute(experts, plan.spec, gradient_scale)
    forward: Callable[..., Tensor] = ExpertParallelForward(experts, plan, compute, compute_dtype)
    plan.called.forward = forward


def is_expert_parallel(model: nn.Module) -> bool:
    """Whether a model's experts have been given their expert-parallel forward."""
    return any(isinstance(module.__dict__.get("forward"), ExpertParallelForward) for module in model.modules())
