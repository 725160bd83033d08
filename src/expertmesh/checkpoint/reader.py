"""Reading safetensors files by byte range: each rank reads what its own shards are made of, and nothing else.

Every read leaves two fingerprints. `RunChecksum`s cover the bytes as they are in the file, to be compared with what the
writer noted. A `Fingerprint` covers the elements as they went into a parameter, to be compared, once the model is
complete, with what the parameter holds then (`check_fingerprints`): a weight that never arrived, arrived elsewhere, or
was overwritten since is found.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import torch
from torch import Tensor

from expertmesh.checkpoint.boxes import Box, contiguous_runs
from expertmesh.checkpoint.checksum import RunChecksum
from expertmesh.checkpoint.conversion import LoadPlan
from expertmesh.checkpoint.file_io import CHUNK, InputFiles, bytes_of, num_threads
from expertmesh.checkpoint.pieces import Piece, in_chunks
from expertmesh.checkpoint.safetensors_format import StoredTensor
from expertmesh.checkpoint.shards import LocalShard
from expertmesh.errors import CheckpointError, some


@dataclass(frozen=True)
class Fingerprint:
    """The CRC-32 of a box of a tensor, row-major, in the tensor's own dtype."""

    name: str
    box: Box
    crc: int


@dataclass
class Reading:
    """What was read.

    Attributes:
        runs: checksums of the files' bytes.
        fingerprints: checksums of what was put into the destinations.
        nbytes: bytes read.
    """

    runs: list[RunChecksum] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)
    nbytes: int = 0

    def add(self, other: Reading) -> None:
        """Take in what another one read."""
        self.runs.extend(other.runs)
        self.fingerprints.extend(other.fingerprints)
        self.nbytes += other.nbytes


def read_shards(plan: LoadPlan, shards: Mapping[str, LocalShard]) -> Reading:
    """Read this rank's part of every tensor into place. Not collective.

    Args:
        plan: has an entry for each of the shards.
        shards: by the model's names; their tensors are written to, whatever their device, dtype and strides.

    Raises:
        CheckpointError: a file is shorter than its header says.
        OSError: a file cannot be read.
    """
    opaque = {name for name in shards if plan.tensors[name].opaque}
    total = Reading()
    with ThreadPoolExecutor(num_threads()) as threads:
        followed = [(name, shard) for name, shard in shards.items() if name not in opaque]
        for reading in threads.map(lambda item: read_box(plan, item[0], item[1].box, item[1].tensor), followed):
            total.add(reading)
    for names in _by_sources(plan, opaque):
        total.add(_read_converted(plan, {name: shards[name] for name in names}))
    return total


def read_box(plan: LoadPlan, name: str, box: Box, destination: Tensor) -> Reading:
    """Read a box of one tensor whose conversion could be followed.

    Args:
        plan: where its elements are.
        name: the model's name of it.
        box: which part, in the whole tensor's coordinates.
        destination: `[*box.shape]`, any device, dtype and strides.
    """
    traced = plan.tensors[name]
    reading = Reading()
    with InputFiles() as files:
        for piece in traced.pieces:
            part = piece.cut(box)
            if part is not None:
                for chunk in in_chunks(part, CHUNK // plan.stored[part.source].dtype.itemsize):
                    region = destination[chunk.box.within(box).slices]
                    _read_piece(files, plan.stored[chunk.source], chunk, traced.dtype, region, name, reading)
    return reading


def read_whole(stored: StoredTensor) -> tuple[Tensor, RunChecksum]:
    """One stored tensor as it is, and the checksum of its bytes."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    buffer = bytes_of(tensor)
    with InputFiles() as files:
        files.read(stored, 0, buffer)
    return tensor, RunChecksum(stored.name, 0, stored.nbytes, zlib.crc32(buffer))


def check_fingerprints(fingerprints: list[Fingerprint], shards: Mapping[str, LocalShard]) -> None:
    """Compare what was read with what the model holds by now. Not collective.

    Args:
        fingerprints: of the reads.
        shards: of the model as it is now, looked up anew.

    Raises:
        CheckpointError: names the tensors that differ.
    """

    def differs(expected: Fingerprint) -> bool:
        shard = shards.get(expected.name)
        return shard is None or zlib.crc32(bytes_of(shard.region(expected.box))) != expected.crc

    with ThreadPoolExecutor(num_threads()) as threads:
        wrong = [fp.name for fp, bad in zip(fingerprints, threads.map(differs, fingerprints), strict=True) if bad]
    if wrong:
        names = sorted(set(wrong))
        raise CheckpointError(
            f"after loading, {len(names)} of the model's tensors are not what the files hold: {some(names)}. "
            f"Nothing was trained; please report this with the model's name."
        )


def _read_piece(
    files: InputFiles,
    stored: StoredTensor,
    piece: Piece,
    dtype: torch.dtype,
    region: Tensor,
    name: str,
    reading: Reading,
) -> None:
    """Read one piece into `region`; `dtype` is what the conversion gives the tensor before its owner casts it."""
    source_box = piece.source_box()
    strides = tuple(prod(source_box.shape[dim + 1 :]) for dim in range(len(source_box.shape)))
    layout = piece.strides_in(strides)
    direct = stored.dtype == dtype == region.dtype and region.device.type == "cpu" and region.is_contiguous()
    direct = direct and source_box.numel == region.numel() and _row_major(piece.shape, layout)
    buffer = region if direct else torch.empty(source_box.shape, dtype=stored.dtype)
    view = bytes_of(buffer)
    size, position = stored.dtype.itemsize, 0
    for first, count in contiguous_runs(stored.shape, source_box):
        run = view[position : position + count * size]
        files.read(stored, first * size, run)
        reading.runs.append(RunChecksum(stored.name, first * size, len(run), zlib.crc32(run)))
        position += len(run)
    reading.nbytes += position
    if direct:
        crc = reading.runs[-1].crc if position == len(run) else zlib.crc32(view)
    else:
        elements = buffer.flatten().as_strided(piece.shape, layout).to(dtype).to(region.dtype).contiguous()
        region.copy_(elements)
        crc = zlib.crc32(bytes_of(elements))
    reading.fingerprints.append(Fingerprint(name, piece.box, crc))


def _read_converted(plan: LoadPlan, shards: Mapping[str, LocalShard]) -> Reading:
    """Read tensors that have to be computed from whole source tensors."""
    reading, sources = Reading(), {}
    for source in sorted(frozenset(chain.from_iterable(plan.tensors[name].sources for name in shards))):
        sources[source], run = read_whole(plan.stored[source])
        reading.runs.append(run)
        reading.nbytes += run.length
    converted = plan.convert(sources)
    for name, shard in shards.items():
        elements = converted[name][shard.box.slices].to(plan.tensors[name].dtype).to(shard.tensor.dtype).contiguous()
        shard.tensor.copy_(elements)
        reading.fingerprints.append(Fingerprint(name, shard.box, zlib.crc32(bytes_of(elements))))
    return reading


def _by_sources(plan: LoadPlan, names: set[str]) -> Iterator[list[str]]:
    """Names in groups that are made of the same stored tensors, so that none is read twice."""
    groups: dict[frozenset[str], list[str]] = {}
    for name in sorted(names):
        groups.setdefault(plan.tensors[name].sources, []).append(name)
    yield from groups.values()


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
