"""Boxes of what FSDP2 and expert parallelism make of a weight, on 4 ranks: run by `test_checkpoint_boxes.py`.

Every weight holds its own element numbers, so each rank compares what it has with the whole at its box.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from expertmesh.checkpoint.boxes import box_of, is_primary
from expertmesh.errors import CheckpointError

# (dp_replicate, efsdp, ep)
MESHES = [(1, 2, 2), (1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
EXPERT_SHAPES = [(8, 6, 5), (4, 6, 5), (12, 7, 3), (4, 3, 2), (20, 2)]
DENSE_SHAPES = [(8, 3), (7, 3), (3, 5), (1, 4), (5,), (2, 3, 5)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


def assert_tiles(tensor: torch.Tensor, case: object) -> None:
    """This rank's box selects what it holds, and the ranks that write cover every element once."""
    whole, box = numbered(tuple(tensor.shape)), box_of(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert local.shape == box.shape, (case, local.shape, box)
    assert torch.equal(local, whole[box.slices]), (case, local, box)
    written = torch.zeros_like(whole)
    if is_primary(tensor):
        written[box.slices] += 1
    dist.all_reduce(written)
    assert (written == 1).all(), (case, written)


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, placement: Shard) -> nn.Parameter:
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: placement)
    return module.weight.detach()


def check_experts(mesh: DeviceMesh) -> None:
    """Sharded by expert over ep first, then by FSDP2 over efsdp, evenly or not, along every dimension it accepts."""
    fsdp = mesh["dp_replicate", "efsdp"] if mesh["dp_replicate"].size() > 1 else mesh["efsdp"]
    for shape in EXPERT_SHAPES:
        for dim in range(len(shape)):
            experts = distribute_tensor(numbered(shape), mesh["ep"], [Shard(0)], src_data_rank=None)
            if dim == 0 or shape[dim] % mesh["efsdp"].size() == 0:
                weight = sharded(experts, fsdp, Shard(dim))
                assert_tiles(weight, (mesh.shape, shape, dim, weight.placements))


def check_dense() -> None:
    for sizes in [(1, 4), (2, 2)]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
        for shape in DENSE_SHAPES:
            assert_tiles(sharded(numbered(shape), mesh, Shard(0)), (sizes, shape))
    for placements in [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(0)),
    ]:
        for shape in [(5, 3), (1, 7)]:
            weight = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
            assert_tiles(weight, (placements, shape))
    scalar = distribute_tensor(torch.tensor(0.0), mesh, [Replicate(), Replicate()], src_data_rank=None)
    assert_tiles(scalar, "0-d")
    assert_tiles(numbered((2, 2)), "plain")


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    interleaved = DTensor.from_local(torch.zeros(4, 3), mesh, [_StridedShard(0, split_factor=2), Replicate()])
    partial = DTensor.from_local(torch.zeros(4, 3), mesh, [Partial(), Replicate()])
    for tensor, reason in [(interleaved, "interleaves"), (partial, "no share of its own")]:
        try:
            box_of(tensor)
        except CheckpointError as error:
            assert reason in str(error), error
        else:
            raise AssertionError(f"{tensor.placements} got a box")


dist.init_process_group("gloo")
for sizes in MESHES:
    check_experts(init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "efsdp", "ep")))
check_dense()
check_refusals()
dist.destroy_process_group()
print("ok")
