"""The FSDP2 plugin that does the experts before Accelerate does the rest.

`Accelerator.prepare` calls `set_auto_wrap_policy(model)` before it notes which parameter is which and before it shards
anything. There the experts are sharded by expert; Accelerate then wraps what is left, skipping what already is FSDP's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from expertmesh_plugins.accelerate.replicas import equalize_replicas
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from expertmesh.checkpoint.deferred import DeferredWeights, take_placeholders
from expertmesh.composition import ShardedExperts, apply_expert_parallel
from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.expert_parallel import is_expert_parallel
from expertmesh.mesh import ExpertMesh, build_expert_mesh
from expertmesh.recompute import OF_BLOCKS


@dataclass
class ExpertMeshFSDPPlugin(FullyShardedDataParallelPlugin):
    """`FullyShardedDataParallelPlugin` (version 2) that applies expert parallelism to the model it is given."""

    config: ExpertParallelConfig = field(default_factory=ExpertParallelConfig)
    expert_mesh: ExpertMesh | None = None
    dense_mesh: DeviceMesh | None = None
    device: torch.device | None = None
    upcast_trainable: bool = False
    fp8: bool = False
    deferred: DeferredWeights | None = None

    @classmethod
    def extend(
        cls,
        plugin: FullyShardedDataParallelPlugin | None,
        *,
        config: ExpertParallelConfig,
        dense_mesh: DeviceMesh,
        device: torch.device,
        mixed_precision: str,
    ) -> ExpertMeshFSDPPlugin:
        """The user's FSDP plugin, or a default one, with expert parallelism added. Collective.

        Raises:
            ConfigError: FSDP version 1, or loading the weights on rank 0 only.
        """
        if plugin is None:
            # On CPUs Accelerate drops the plugin that the launch configuration describes; the description is there.
            plugin = FullyShardedDataParallelPlugin() if "FSDP_VERSION" in os.environ else _default_plugin()
        if plugin.fsdp_version != 2:
            raise ConfigError(
                f"expert parallelism needs FSDP2, but fsdp_version is {plugin.fsdp_version}: "
                f"set `fsdp_version: 2` in fsdp_config."
            )
        if _only_rank_0_loads():
            raise ConfigError(
                "fsdp_cpu_ram_efficient_loading loads the weights on rank 0 only, but every rank needs its own "
                "experts: set `fsdp_cpu_ram_efficient_loading: false` in fsdp_config."
            )
        extended = cls.__new__(cls)
        extended.__dict__.update(plugin.__dict__)
        extended.cpu_ram_efficient_loading = False
        extended.activation_checkpointing |= config.ep_activation_checkpointing in OF_BLOCKS
        if mixed_precision != "no" and extended.mixed_precision_policy is None:
            extended.set_mixed_precision(mixed_precision)
        extended.config = config
        extended.expert_mesh = build_expert_mesh(config, device.type)
        extended.dense_mesh = dense_mesh
        extended.device = device
        # Accelerate keeps float32 master weights of what it trains in mixed precision, but only after this plugin ran.
        extended.upcast_trainable = mixed_precision != "no"
        extended.fp8 = mixed_precision == "fp8"
        extended.deferred = None
        return extended

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Accelerate's hook, called twice for a model: decide what it wraps, and do the experts the first time."""
        super().set_auto_wrap_policy(model)
        if is_expert_parallel(model):
            return
        trainable_dtype = torch.float32 if self.upcast_trainable else None
        self.deferred = take_placeholders(model, trainable_dtype)
        sharded = apply_expert_parallel(
            model,
            self.config,
            self.expert_mesh,
            self.dense_mesh,
            self.device,
            self._fsdp_options(),
            trainable_dtype=trainable_dtype,
            fp8=self.fp8,
        )
        _point_to_shards(sharded)
        self.ignored_modules = [*self._ignored_by_user(model), nn.ParameterList(sharded.unmanaged)]

    def fill_weights(self, model: nn.Module) -> None:
        """Give the model that Accelerate has just sharded its weights. Collective.

        What was left in files is read into the shards. Other trainable weights, such as new adapters, are made equal
        on all replicas; see `equalize_replicas`.

        Raises:
            CheckpointError: as `DeferredWeights.fill` does.
        """
        deferred, self.deferred = self.deferred, None
        if deferred:
            deferred.fill(model)
        equalize_replicas(model, lambda name: deferred is not None and deferred.holds(name))

    def _fsdp_options(self) -> dict[str, Any]:
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": self.cpu_offload,
            "mp_policy": self.mixed_precision_policy or MixedPrecisionPolicy(),
        }

    def _ignored_by_user(self, model: nn.Module) -> list[nn.Module]:
        if isinstance(self.ignored_modules, str):
            pattern = re.compile(self.ignored_modules)
            return [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        return list(self.ignored_modules or ())


def _default_plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def _only_rank_0_loads() -> bool:
    flags = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    return all(os.environ.get(flag, "false").lower() in ("true", "1") for flag in flags)


def _point_to_shards(sharded: ShardedExperts) -> None:
    """Let the old Parameters, which the script's optimizer holds, own the new local shards.

    Accelerate finds out which optimizer entry is which new parameter by comparing data pointers.
    """
    for replaced in sharded.replaced:
        replaced.old.data = replaced.new.to_local()
