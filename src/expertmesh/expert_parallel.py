"""Turning one experts module into its expert-parallel self: shard its parameters, replace its forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from expertmesh.adapters import AdapterParameter, ExpertAdapters
from expertmesh.compute import build_expert_function
from expertmesh.compute.normed import normed_experts
from expertmesh.compute.projection import ProjectionTensors
from expertmesh.compute.routed import ExpertFunction, ExpertTensors, routed_experts
from expertmesh.config import ExpertParallelConfig
from expertmesh.dispatch import TokenDispatcher, build_dispatcher
from expertmesh.errors import ModelError
from expertmesh.experts import ExpertsSpec
from expertmesh.host_memory import untouched
from expertmesh.mesh import ExpertMesh


class ExpertParallelForward:
    """The forward of an expert-parallel experts module: dispatch, compute, combine.

    Takes what the module's own forward took, `(hidden_states [tokens, hidden], top_k_index [tokens, top_k],
    top_k_weights [tokens, top_k])` with global expert ids, and returns `[tokens, hidden]`.

    Raises:
        ModelError: the hidden states are not a matrix of tokens.
    """

    def __init__(
        self,
        experts: nn.Module,
        spec: ExpertsSpec,
        dispatcher: TokenDispatcher,
        function: ExpertFunction,
        compute_dtype: torch.dtype | None,
        adapters: ExpertAdapters | None,
    ) -> None:
        self.experts = experts
        self.spec = spec
        self.dispatcher = dispatcher
        self.function = function
        self.compute_dtype = compute_dtype
        self.adapters = adapters

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
            output = self._exchange_and_compute(tokens, top_k_index.long(), top_k_weights)
        return output.to(hidden_states.dtype)

    def _exchange_and_compute(self, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        dispatched = self.dispatcher.dispatch(tokens, top_k_index, top_k_weights)
        operands = (self._local_tensors(), dispatched.tokens, dispatched.row_weights, dispatched.rows)
        if self.spec.has_post_expert_norm:
            output = normed_experts(self.function, *operands, self.experts.post_expert_norm)
        else:
            output = routed_experts(self.function, *operands)
        return self.dispatcher.combine(output, dispatched.state)

    def _dtype_on(self, device_type: str, default: torch.dtype) -> torch.dtype:
        if self.compute_dtype is not None:
            return self.compute_dtype
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else default

    def _local_tensors(self) -> ExpertTensors:
        # FSDP2 swaps the attribute between its sharded and its gathered form, so it is looked up at every call.
        local = {name: getattr(self.experts, name).to_local() for name in self.spec.parameter_names}
        adapters = self.adapters.active() if self.adapters is not None else {}
        return ExpertTensors(
            *(
                ProjectionTensors(local[name], local.get(f"{name}_bias"), adapters.get(name))
                for name in (self.spec.up_name, "down_proj")
            )
        )


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


def install_forward(
    experts: nn.Module,
    spec: ExpertsSpec,
    mesh: ExpertMesh,
    config: ExpertParallelConfig,
    gradient_scale: float,
    compute_dtype: torch.dtype | None,
    adapters: ExpertAdapters | None = None,
) -> None:
    """Give the experts module, or the outermost wrapper around it, its expert-parallel forward.

    Args:
        experts: already sharded by `shard_by_expert`.
        spec: its layout.
        mesh: the expert view of the ranks.
        config: names the dispatcher and the compute.
        gradient_scale: factor on the experts' gradients that nobody else applies.
        compute_dtype: what tokens are sent and multiplied in; by default autocast's dtype, or their own.
        adapters: what wraps it.
    """
    dispatcher = build_dispatcher(config.ep_dispatcher, mesh.ep, spec.num_experts)
    function = build_expert_function(config.ep_compute, experts, spec, gradient_scale)
    forward: Callable[..., Tensor] = ExpertParallelForward(experts, spec, dispatcher, function, compute_dtype, adapters)
    called = experts if adapters is None else adapters.module
    called.forward = forward


def is_expert_parallel(model: nn.Module) -> bool:
    """Whether a model's experts have been given their expert-parallel forward."""
    return any(isinstance(module.__dict__.get("forward"), ExpertParallelForward) for module in model.modules())
