"""`ParallelismConfig` with an expert axis."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from expertmesh_plugins.accelerate.eight_bits import take_over_fp8
from expertmesh_plugins.accelerate.fsdp import ExpertMeshFSDPPlugin
from expertmesh_plugins.accelerate.patches import patch_accelerate

from expertmesh.compute import check_compute
from expertmesh.config import ExpertParallelConfig, refuse_sequence_parallelism
from expertmesh.dispatch import check_dispatcher
from expertmesh.layers import check_layers
from expertmesh.plugins import load_plugin

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(repr=False)
class ExpertMeshConfig(ParallelismConfig):
    """Accelerate's `ParallelismConfig` plus expert parallelism (EP): hand it to `Accelerator` or `TrainingArguments`.

    Attributes that are `None` are read from the environment of `accelerate launch`, then take their defaults.

    Attributes:
        ep_size: ranks that share one layer's experts; divides `dp_shard_size * cp_size`. Default 1.
        ep_dispatcher: how tokens travel. Default `auto`.
        ep_compute: how experts are multiplied. Default `auto`.
        ep_chunks: parts of a batch, of which one travels while another is computed. Default 1.
        ep_overlap: compute shared experts while tokens travel. Default true.
        ep_activation_checkpointing: what a block keeps for the backward: `none` (all of it), `full` (its input and its
            routing), `selective` (what is dear to get again too) or `experts_only` (all but what its experts need).
            Default `none`.
        ep_layers: the layers around the experts. Default `auto`, the model's own, whose norms keep less.
        ep_layers_only, ep_layers_keep: patterns of the modules that may be replaced, and of those that stay.
        ep_fp8_recipe: how values are scaled where `mixed_precision` is `fp8`. Default `auto`.
        ep_loss: how a language model's loss is taken without its logits; `hf` takes it from them. Default `auto`.
        ep_checkpoint_format: `hf`, a Hugging Face model, or `dcp`, as Accelerate's FSDP2 writes it. Default `hf`.
        ep_async_save: write checkpoints in the background. Default false.
        ep_balance_aux_loss: a model's load-balancing loss over the `global` batch, or each rank's, `local`. Default
            `global`.
        ep_balance_bias_rate: what routers' correction biases move by after an optimizer step. Default 0, not at all.
        ep_z_loss: coefficient of the routers' z-loss. Default 0, none.

    `dp_shard_size` defaults to all the ranks that the other sizes leave.

    Raises:
        ConfigError: sizes or choices that cannot work, when constructed and before any weight is read.
    """

    ep_size: int | None = None
    ep_dispatcher: str | None = None
    ep_compute: str | None = None
    ep_chunks: int | None = None
    ep_overlap: bool | None = None
    ep_activation_checkpointing: str | None = None
    ep_layers: str | None = None
    ep_layers_only: str | None = None
    ep_layers_keep: str | None = None
    ep_fp8_recipe: str | None = None
    ep_loss: str | None = None
    ep_checkpoint_format: str | None = None
    ep_async_save: bool | None = None
    ep_balance_aux_loss: str | None = None
    ep_balance_bias_rate: float | None = None
    ep_z_loss: float | None = None

    def __post_init__(self) -> None:
        refuse_sequence_parallelism(self.sp_size)
        given = {key: getattr(self, key) for key in ExpertParallelConfig.__dataclass_fields__}
        environment = ExpertParallelConfig.from_environment(os.environ)
        choices = {key: getattr(environment, key) if value is None else value for key, value in given.items()}
        self._expert_parallel = ExpertParallelConfig(**choices).resolve(_world_size())
        check_dispatcher(self._expert_parallel.ep_dispatcher)
        check_compute(self._expert_parallel.ep_compute)
        check_layers(self._expert_parallel.ep_layers)
        for key in given:
            setattr(self, key, getattr(self._expert_parallel, key))
        super().__post_init__()

    def __repr__(self) -> str:
        choices = ", ".join(f"{key}={value!r}" for key, value in vars(self._expert_parallel).items())
        return f"{type(self).__name__}({choices})"

    @property
    def expert_parallel(self) -> ExpertParallelConfig:
        """The same choices as the core knows them, resolved for the world size."""
        return self._expert_parallel

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Accelerate's own hook: it hands us the accelerator once its state exists, before anything is prepared."""
        patch_accelerate()
        take_over_fp8(accelerator, self.expert_parallel)
        _patch_transformers()
        if accelerator.num_processes > 1:
            self._install_fsdp_plugin(accelerator)
        super()._validate_accelerator(accelerator)

    def _install_fsdp_plugin(self, accelerator: Accelerator) -> None:
        # Accelerate slices its own mesh in a way that PyTorch announces the end of; users cannot help it.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        state = accelerator.state
        plugin = ExpertMeshFSDPPlugin.extend(
            getattr(state, "fsdp_plugin", None),
            config=self.expert_parallel,
            dense_mesh=self.device_mesh[tuple(self.fsdp_dim_names)],
            device=accelerator.device,
            mixed_precision=accelerator.mixed_precision,
        )
        state.fsdp_plugin = plugin
        # Accelerate turns FSDP on by itself on accelerators only; on CPUs it would fall back to DDP.
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _patch_transformers() -> None:
    """Let Transformers load and save like us too, where a script uses its Trainer; which it has imported by then."""
    plugin = load_plugin("transformers").__name__
    import_module(f"{plugin}.checkpointing").patch_checkpointing()
    if "transformers.trainer" in sys.modules:
        import_module(f"{plugin}.trainer").patch_trainer()
        import_module(f"{plugin}.balance").patch_trainer()
        import_module(f"{plugin}.loss").patch_trainer()


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
