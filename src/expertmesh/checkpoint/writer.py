"""Writing safetensors files by byte range: every rank puts the bytes of its own shards into their final place.

The place of each tensor's bytes is known before one is written, so no rank needs another's weights: nothing is
gathered, nothing is written twice, and there is nothing to merge afterwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.boxes import contiguous_runs
from expertmesh.checkpoint.checksum import RunChecksum, combine_runs
from expertmesh.checkpoint.conversion import revert, trace_save
from expertmesh.checkpoint.file_io import CHUNK, OutputFiles, bytes_of, create_file, num_threads
from expertmesh.checkpoint.pieces import Piece, in_chunks
from expertmesh.checkpoint.safetensors_format import (
    INDEX_FILE,
    PlannedFile,
    PlannedTensor,
    StoredTensor,
    index_json,
    plan_files,
)
from expertmesh.checkpoint.shards import LocalShard, local_shards, tensors_to_save
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather, world

MAX_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True)
class Weights:
    """A model's weights as they will be stored, and this rank's part of them.

    Attributes:
        tensors: what every stored tensor is made of; equal on all ranks.
        shards: this rank's part of the model's tensors, by the model's names.
        converted: stored tensors that had to be computed, on the rank that writes them.
    """

    tensors: Mapping[str, TracedTensor]
    shards: Mapping[str, LocalShard]
    converted: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, *, copy: bool = False) -> Weights:
        """A model's weights. Collective only if the model's conversion computes something.

        Args:
            model: sharded or whole.
            copy: into memory of their own, so that the model may change before they are written.
        """
        own = tensors_to_save(model)
        tensors = trace_save(model)
        shards = {name: shard for name, shard in local_shards(own).items() if shard.primary}
        if copy:
            shards = {name: shard.copied() for name, shard in shards.items()}
        return cls(tensors, shards, _convert_opaque(model, own, tensors))

    def plan(self, max_shard_size: int = MAX_SHARD_SIZE) -> list[PlannedFile]:
        """The files, laid out."""
        return plan_files(
            [PlannedTensor(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()], max_shard_size
        )


def write_weights(
    weights: Weights, folder: Path, *, max_shard_size: int = MAX_SHARD_SIZE, group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """Write a folder of safetensors files and their index. Collective over `group`.

    Files are complete and on the disk when it returns.

    Returns:
        The CRC-32 of every stored tensor's bytes, as 8 hexadecimal digits, by stored name; on every rank.

    Raises:
        CheckpointError: on every rank, if one cannot write, or if the ranks' parts do not make up a tensor.
    """
    files = weights.plan(max_shard_size)
    rank, size = world(group)
    with agreed(f"create the weight files in {folder}", group):
        for file in files[rank::size]:
            create_file(folder / file.filename, file.header, file.nbytes)
        if rank == 0:
            create_file(folder / INDEX_FILE, index_json(files).encode())
    with agreed(f"write the weights to {folder}", group):
        runs = write_parts(weights, files, folder)
    return _combine(files, runs, group)


def write_parts(weights: Weights, files: Sequence[PlannedFile], folder: Path) -> list[RunChecksum]:
    """This rank's part of all files."""
    parts = _parts_by_source(weights)
    placed = {name: tensor for file in files for name, tensor in file.tensors.items()}
    with OutputFiles(folder, [file.filename for file in files]) as output, ThreadPoolExecutor(num_threads()) as threads:

        def write(name: str) -> list[RunChecksum]:
            shard = weights.shards[name]
            return [
                run
                for stored, piece in parts.get(name, ())
                for run in write_piece(output, placed[stored], piece, shard)
            ]

        runs = [run for written in threads.map(write, weights.shards) for run in written]
        for name, tensor in weights.converted.items():
            runs.append(_write_run(output, placed[name], 0, bytes_of(tensor)))
        output.sync()
    return runs


class Output(Protocol):
    """Where a stored tensor's bytes go."""

    def write(self, stored: StoredTensor, start: int, run: memoryview) -> None:
        """Take the bytes of a tensor from its byte `start` on."""


def write_piece(output: Output, stored: StoredTensor, piece: Piece, shard: LocalShard) -> Iterator[RunChecksum]:
    """Write what a shard has of one piece of a stored tensor, run by run."""
    part = piece.cut_in_source(shard.box)
    if part is None:
        return
    itemsize = stored.dtype.itemsize
    for chunk in in_chunks(part, CHUNK // itemsize):
        view = bytes_of(_region(shard, chunk))
        position = 0
        for first, count in contiguous_runs(stored.shape, chunk.box):
            yield _write_run(output, stored, first * itemsize, view[position : position + count * itemsize])
            position += count * itemsize


def _write_run(output: Output, stored: StoredTensor, start: int, run: memoryview) -> RunChecksum:
    output.write(stored, start, run)
    return RunChecksum(stored.name, start, len(run), zlib.crc32(run))


def _region(shard: LocalShard, piece: Piece) -> Tensor:
    """The elements of a piece of a stored tensor, in its order, out of the shard that has them."""
    strides = shard.tensor.stride()
    local = [start - first for start, first in zip(piece.source_offset, shard.box.offset, strict=True)]
    offset = shard.tensor.storage_offset() + sum(at * stride for at, stride in zip(local, strides, strict=True))
    return shard.tensor.as_strided(piece.shape, piece.strides_in(strides), offset)


def _parts_by_source(weights: Weights) -> dict[str, list[tuple[str, Piece]]]:
    """For each of the model's tensors, the pieces of stored tensors that are made of it."""
    parts: dict[str, list[tuple[str, Piece]]] = {}
    for stored, tensor in weights.tensors.items():
        if not tensor.opaque:
            for piece in tensor.pieces:
                parts.setdefault(piece.source, []).append((stored, piece))
    return parts


def _convert_opaque(
    model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, TracedTensor]
) -> dict[str, Tensor]:
    """Compute what cannot be followed, from whole tensors; each group of them on one rank, in turn."""
    groups: dict[frozenset[str], list[str]] = {}
    for stored, tensor in tensors.items():
        if tensor.opaque:
            groups.setdefault(tensor.sources, []).append(stored)
    rank, size = world(None)
    converted: dict[str, Tensor] = {}
    for turn, (sources, names) in enumerate(groups.items()):
        whole = {source: _whole(own[source]) for source in sorted(sources)}
        if turn % size == rank:
            result = revert(model, whole)
            converted.update({name: result[name].to("cpu", copy=True) for name in names})
    return converted


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _combine(
    files: Sequence[PlannedFile], runs: Sequence[RunChecksum], group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Every stored tensor's checksum from all ranks' parts of it, which also proves that there is no hole."""
    by_tensor: dict[str, list[RunChecksum]] = {}
    for rank_runs in gather(list(runs), group):
        for run in rank_runs:
            by_tensor.setdefault(run.tensor, []).append(run)
    checksums = {}
    for stored in (tensor for file in files for tensor in file.tensors.values()):
        crc = combine_runs(by_tensor.get(stored.name, ()), stored.nbytes)
        if crc is None:
            raise CheckpointError(
                f"the ranks' parts of {stored.name} do not make up the whole tensor, so no checkpoint was written: "
                f"the model is sharded in a way that cannot be saved; please report it with the launch configuration."
            )
        checksums[stored.name] = f"{crc:08x}"
    return checksums
