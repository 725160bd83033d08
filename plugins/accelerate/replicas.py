"""Weights that every replica starts with, whatever the ranks drew."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_AXIS = "dp_replicate"


@torch.no_grad()
def equalize_replicas(model: nn.Module, is_equal: Callable[[str], bool]) -> None:
    """Give all replicas the first one's trainable weights. Collective over the ranks that hold the same shard.

    FSDP2 averages the gradients of replicas and never looks at their weights. Where ranks drew new weights (adapters,
    say) with different seeds, the replicas would train different models for ever. Without replicas nothing can differ:
    each element has one owner on the dense mesh, and one on the experts'.

    Args:
        model: sharded.
        is_equal: whether a parameter, by its qualified name, is known to be the same everywhere.
    """
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)) or is_equal(name):
            continue
        mesh = parameter.device_mesh
        if _AXIS in (mesh.mesh_dim_names or ()) and parameter.to_local().numel():
            dist.broadcast(parameter.to_local(), group=mesh[_AXIS].get_group(), group_src=0)
