"""Boxes: the rectangular part of a tensor that one rank holds, and where its elements lie in the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from expertmesh.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor; `offset` and `shape` have one entry a dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements the box holds; 1 for the box of a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index past the box in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What selects the box when it indexes the tensor whose coordinates the box is in."""
        return tuple(slice(start, stop) for start, stop in zip(self.offset, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The box of the elements in both, or None when there are none."""
        offset = tuple(max(pair) for pair in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(pair) for pair in zip(self.stop, other.stop, strict=True))
        shape = tuple(end - start for start, end in zip(offset, stop, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Box) -> Box:
        """The same elements in coordinates that start at `outer`'s first element.

        Raises:
            ValueError: the box is not inside `outer`.
        """
        offset = tuple(inner - start for inner, start in zip(self.offset, outer.offset, strict=True))
        if any(start < 0 for start in offset) or any(a > b for a, b in zip(self.stop, outer.stop, strict=True)):
            raise ValueError(f"{self} is not inside {outer}")
        return Box(offset, self.shape)


def contiguous_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The maximal runs of consecutive elements, in row-major order, that make up `box` inside a tensor of `shape`.

    Yields:
        (first element, number of elements), ascending. Nothing for an empty box; (0, 1) for a 0-d tensor.
    """
    if box.numel == 0:
        return
    # A run spans the last dimension that the box cuts, and everything after it, which is whole.
    cut = len(shape)
    while cut > 0 and box.shape[cut - 1] == shape[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    length = math.prod(box.shape[outer:])
    steps = (range(0, box.shape[dim] * strides[dim], strides[dim]) for dim in range(outer))
    for step in itertools.product(*steps):
        yield first + sum(step), length


def box_of(tensor: Tensor) -> Box:
    """Where this rank's share of `tensor` lies in the whole: all of it unless `tensor` is a sharded DTensor.

    An empty share is a box with a 0 in its shape.

    Raises:
        CheckpointError: the share is no box: interleaved rows, a partial sum, or a rank outside the DTensor's mesh.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    if tensor.device_mesh.get_coordinate() is None or any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a tensor placed {tensor.placements} on {tensor.device_mesh} has no share of its own on this rank to save "
            "or load; redistribute it to Shard or Replicate placements on a mesh of all ranks first"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offset), tuple(shape))
    strided = {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}
    if any(not _is_one_range(tensor, dim) for dim in strided):
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} placed {tensor.placements} on {tensor.device_mesh} interleaves; "
            "what this rank holds of it is no box; redistribute it to Shard placements before saving or loading"
        )
    return box


def is_primary(tensor: Tensor) -> bool:
    """Whether this rank is the one, among the ranks that hold the same elements of `tensor`, that writes them.

    A DTensor's replicas: the first along every mesh axis that does not shard it. A plain tensor: global rank 0.
    """
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and all(
            index == 0
            for index, placement in zip(coordinate, tensor.placements, strict=True)
            if placement.is_replicate()
        )
    return not dist.is_initialized() or dist.get_rank() == 0


def _is_one_range(tensor: DTensor, dim: int) -> bool:
    """Whether this rank's indices along `dim` are consecutive.

    torch reports only the first index. `_StridedShard` takes a part of each of several blocks, which is one range only
    if a later mesh axis then keeps a single block (experts sharded over ep first, over efsdp next), so the indices
    themselves are followed through every placement, left to right, as torch does.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    whole = torch.arange(tensor.shape[dim]).view([-1 if axis == dim else 1 for axis in range(tensor.ndim)])
    indices = whole
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            parts, _ = placement._split_tensor(indices, tensor.device_mesh.size(mesh_dim), with_padding=False)
            indices = parts[coordinate[mesh_dim]]
    return indices.numel() == 0 or int(indices.max() - indices.min()) == indices.numel() - 1
