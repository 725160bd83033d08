"""How many tokens a rank may have, for engines whose buffers are made for a number of them: the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Engines cut tokens into chunks of this many.
_SMALLEST = 64


class Capacity:
    """The largest number of tokens that any rank of a group ever had, rounded up to a power of two.

    It only grows, and rarely, so that buffers are made and kernels are compiled a few times at most.

    Args:
        ep_mesh: the group.
    """

    def __init__(self, ep_mesh: DeviceMesh) -> None:
        self._ep_mesh = ep_mesh
        self._host_mesh: DeviceMesh | None = None
        self._agreed = _SMALLEST

    def at_least(self, num_tokens: int) -> int:
        """The capacity, now that this rank has `num_tokens`. Collective; the device is neither asked nor waited for."""
        if self._host_mesh is None:
            self._host_mesh = host_mesh(self._ep_mesh)
        largest = torch.tensor(num_tokens)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host_mesh.get_group())
        self._agreed = max(self._agreed, 1 << (int(largest) - 1).bit_length())
        return self._agreed


def host_mesh(ep_mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, with a group that takes tensors on the CPU: theirs if it does, else a new one. Collective."""
    group = ep_mesh.get_group()
    if "gloo" in dist.get_backend_config(group):
        return ep_mesh
    return new_host_mesh(ep_mesh)


def new_host_mesh(ep_mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks with a gloo group of their own. Collective over these ranks only."""
    ranks = ep_mesh.mesh.flatten().tolist()
    return DeviceMesh.from_group(dist.new_group(ranks, backend="gloo", use_local_synchronization=True), "cpu")
