"""Our dispatchers for users of Transformers' own expert parallelism: `DistributedConfig(ep_implementation="deepep")`.

Transformers shards, loads, scales gradients and saves as it always does; only the way of tokens through one experts
module is ours. Contract, checked on transformers 5.24.0 and covered by tests/test_ep_implementation.py:

- `EPImplementationInterface.register(name, build)`; `build(experts, ep_mesh, tp_mesh)` is called once a module, on
  every rank, after its parameters have become DTensors on `ep_mesh` and before weights are loaded;
- what it returns is called with this rank's batch and global expert ids, while the parameters of the experts module are
  their local parts (`_use_local_dtensor_params`);
- ranks of `tp_mesh` hold the same batch: each takes its slice, as `AllToAllEP` does.

Names are those of `ep_dispatcher`; `expertmesh` stands for its `auto`. A name that Transformers uses itself keeps its
meaning, and ours gets the prefix `expertmesh_`.

Nothing of the core is imported before a model is built: this file is loaded while Transformers is still being imported.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

if TYPE_CHECKING:
    from expertmesh.dispatch import TokenDispatcher
    from expertmesh.dispatch.transport import Situation

_AUTO = "expertmesh"
# One for all modules of a model, gone with the last of them. It holds its mesh, whose id is therefore nobody else's.
_dispatchers: WeakValueDictionary[tuple[str, int, Situation], TokenDispatcher] = WeakValueDictionary()
_served: WeakSet[nn.Module] = WeakSet()


def register(expert_parallel: ModuleType) -> None:
    """Add our dispatchers, and other packages', to the names that `DistributedConfig.ep_implementation` may have."""
    interface = expert_parallel.EPImplementationInterface
    taken = set(interface())
    interface.register(_AUTO, partial(DispatchedEP, "auto"))
    for name in ("all_to_all", *(entry.name for entry in entry_points(group="expertmesh.dispatchers"))):
        interface.register(f"{_AUTO}_{name}" if name in taken else name, partial(DispatchedEP, name))


def is_served(model: nn.Module) -> bool:
    """Whether one of our dispatchers moves the tokens of a model that Transformers made expert-parallel."""
    return any(module in _served for module in model.modules())


class DispatchedEP(EPImplementation):
    """One experts module whose tokens travel by one of our dispatchers and are multiplied by our expert GEMMs.

    Args:
        dispatcher: `auto` or a name of `ep_dispatcher`.
        experts: holds its part of the experts, as DTensors.
        ep_mesh: 1-D mesh of the ranks that share them.
        tp_mesh: 1-D mesh of the ranks that hold the same batch.

    Raises:
        ConfigError: the dispatcher cannot be used; on every rank, before a weight is loaded.
        ModelError: the experts are of a kind that we cannot compute.
    """

    def __init__(self, dispatcher: str, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        from expertmesh_plugins.transformers.checkpointing import patch_checkpointing

        from expertmesh.compute import choose_compute
        from expertmesh.errors import ModelError
        from expertmesh.expert_parallel import ExpertParallelForward, ExpertPlan, situation_of
        from expertmesh.experts import ExpertsSpec, is_experts

        if not is_experts(experts):
            raise ModelError(
                f"{type(experts).__name__} does not follow Transformers' `use_experts_implementation` contract: choose "
                f"an ep_implementation of Transformers' own."
            )
        spec = ExpertsSpec.of(experts)
        device = _device(ep_mesh)
        situation = situation_of(experts, spec, ep_mesh.size(), device, None)
        moving = _dispatcher(dispatcher, ep_mesh, situation)
        compute = choose_compute("auto", experts, spec, situation.dtype, device, moving.counts_on_host)
        plan = ExpertPlan(spec, moving, compute, None, experts, 1)
        # Gradients are scaled by Transformers.
        self.forward = ExpertParallelForward(experts, plan, compute(experts, spec, 1.0), None)
        _served.add(experts)
        patch_checkpointing()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[tokens, hidden]`, the weighted sums of what the experts of all ranks make of this rank's tokens."""
        if self.tp_mesh.size() == 1:
            return self.forward(hidden_states, top_k_index, top_k_weights)
        slices = (self._slice(tensor) for tensor in (hidden_states, top_k_index, top_k_weights))
        output = self.forward(*slices).contiguous()
        shape, stride = hidden_states.shape, (hidden_states.shape[1], 1)
        return DTensor.from_local(output, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()

    def _slice(self, tensor: Tensor) -> Tensor:
        """This rank's tokens among those of its TP group, who all hold the same."""
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _dispatcher(name: str, ep_mesh: DeviceMesh, situation: Situation) -> TokenDispatcher:
    from expertmesh.dispatch import build_dispatcher

    key = (name, id(ep_mesh), situation)
    dispatcher = _dispatchers.get(key)
    if dispatcher is None:
        dispatcher = _dispatchers[key] = build_dispatcher(name, ep_mesh, situation)
    return dispatcher
