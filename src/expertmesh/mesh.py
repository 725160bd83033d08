"""Two views of the same ranks: dense weights see `(dp_replicate, dp_shard_cp)`, experts `(dp_replicate, efsdp, ep)`.

Example: 8 ranks, dp_replicate_size=2, dp_shard_size=4, ep_size=2, so efsdp = 4 / 2 = 2, and 8 experts [E0..E7]::

    rank          0      1      2      3      4      5      6      7
    dp_replicate  [------------ 0 ---------]  [------------ 1 ---------]
    dp_shard_cp   0      1      2      3      0      1      2      3      dense view
    efsdp         [---- 0 ---]  [---- 1 ---]  [---- 0 ---]  [---- 1 ---]  expert view
    ep            0      1      0      1      0      1      0      1
    experts       E0-3   E4-7   E0-3   E4-7   E0-3   E4-7   E0-3   E4-7   (each half of them sharded over efsdp)

`ep` is the fastest axis, so an EP group is contiguous ranks: one node's, as long as `ep_size` is at most its size. Each
rank keeps its own tokens: EP borrows data-parallel ranks, it does not replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.gloo_exit import wait_a_moment_at_exit


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks as experts see them.

    Attributes:
        mesh: the mesh `(dp_replicate, efsdp, ep)`, each axis present even at size 1.
    """

    mesh: DeviceMesh

    @property
    def ep(self) -> DeviceMesh:
        """Ranks that hold different experts and exchange tokens."""
        return self.mesh["ep"]

    @property
    def fsdp(self) -> DeviceMesh:
        """Ranks that shard (`efsdp`) and replicate (`dp_replicate`, when there are replicas) the same experts."""
        return self.mesh["dp_replicate", "efsdp"] if self.mesh["dp_replicate"].size() > 1 else self.mesh["efsdp"]

    @property
    def data_parallel_size(self) -> int:
        """Ranks whose mean loss is the global loss; every gradient is divided by it. All ranks of the mesh."""
        return self.mesh.size()

    @property
    def shares_experts(self) -> bool:
        """Whether several ranks hold the same experts, so that weights or gradients travel between them."""
        return self.mesh.size() > self.ep.size()


def build_expert_mesh(config: ExpertParallelConfig, device_type: str) -> ExpertMesh:
    """The expert view over all ranks of the default process group. Collective.

    Args:
        config: resolved for the world size.
        device_type: `cuda`, `cpu`, ...

    Raises:
        ConfigError: the process group is missing, or the sizes do not fit its world size.
    """
    if not dist.is_initialized():
        raise ConfigError("expert parallelism needs torch.distributed: start the script with `accelerate launch`.")
    if device_type == "cpu":
        wait_a_moment_at_exit()
    config = config.resolve(dist.get_world_size())
    shape = (config.dp_replicate_size, config.efsdp_size, config.ep_size)
    with unset_fake_temporarily():  # Ranks are numbers, also where the model's tensors are fake.
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
        # Lets DTensor reduce and gather over both axes in one collective (gradient norms, whole weights).
        mesh["efsdp", "ep"]._flatten("efsdp_ep")
    return ExpertMesh(mesh)


def build_dense_mesh(config: ExpertParallelConfig, device_type: str) -> DeviceMesh:
    """The mesh that FSDP2 shards dense weights on: `(dp_shard_cp,)`, or `(dp_replicate, dp_shard_cp)` with replicas.

    Args:
        config: resolved for the world size.
        device_type: `cuda`, `cpu`, ...
    """
    config = config.resolve(dist.get_world_size())
    axes = {"dp_replicate": config.dp_replicate_size} if config.dp_replicate_size > 1 else {}
    axes["dp_shard_cp"] = config.dp_shard_size * config.cp_size
    with unset_fake_temporarily():
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
