"""Reading safetensors files by byte range: each rank reads what its own shards are made of, and nothing else.

Every read leaves two fingerprints. `RunChecksum`s cover the bytes as they are in the file, to be compared with what the
writer noted. A `Fingerprint` covers the elements as they went into a parameter, to be compared, once the model is
complete, with what the parameter holds then (`check_fingerprints`): a weight that never arrived, arrived elsewhere, or
was overwritten since is found.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.checkpoint.boxes import Box, contiguous_runs
from expertmesh.checkpoint.checksum import RunChecksum
from expertmesh.checkpoint.conversion import LoadPlan
from expertmesh.checkpoint.pieces import Piece
from expertmesh.checkpoint.safetensors_format import StoredTensor
from expertmesh.checkpoint.shards import LocalShard
from expertmesh.errors import CheckpointError

# Bounds what a read needs beside its destination, in bytes and for each thread.
CHUNK = 16 << 20
_THREADS = 4
_NAMES_SHOWN = 5


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
    with ThreadPoolExecutor(_num_threads()) as threads:
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
    with Files() as files:
        for piece in traced.pieces:
            part = piece.cut(box)
            if part is not None:
                for chunk in _chunks(part, plan.stored[part.source].dtype.itemsize):
                    region = destination[chunk.box.within(box).slices]
                    _read_piece(files, plan.stored[chunk.source], chunk, traced.dtype, region, name, reading)
    return reading


def read_whole(stored: StoredTensor) -> tuple[Tensor, RunChecksum]:
    """One stored tensor as it is, and the checksum of its bytes."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    buffer = _bytes_of(tensor)
    with Files() as files:
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
        return shard is None or zlib.crc32(_bytes_of(shard.region(expected.box))) != expected.crc

    with ThreadPoolExecutor(_num_threads()) as threads:
        wrong = [fp.name for fp, bad in zip(fingerprints, threads.map(differs, fingerprints), strict=True) if bad]
    if wrong:
        names = sorted(set(wrong))
        shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" if names[5:] else "")
        raise CheckpointError(
            f"after loading, {len(names)} of the model's tensors are not what the files hold: {shown}. Nothing was "
            f"trained; please report this with the model's name."
        )


class Files:
    """Open files by path, closed at the end of a `with` block."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, stored: StoredTensor, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with a stored tensor's bytes from its byte `start` on."""
        if stored.path not in self._open:
            self._open[stored.path] = os.open(stored.path, os.O_RDONLY)
        position, done = stored.offset + start, 0
        while done < len(buffer):
            count = os.preadv(self._open[stored.path], [buffer[done:]], position + done)
            if count == 0:
                raise CheckpointError(
                    f"{stored.path} ends inside {stored.name}: it is truncated. Use another checkpoint, or fetch "
                    f"the file again."
                )
            done += count


def _read_piece(
    files: Files,
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
    view = _bytes_of(buffer)
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
        crc = zlib.crc32(_bytes_of(elements))
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
        reading.fingerprints.append(Fingerprint(name, shard.box, zlib.crc32(_bytes_of(elements))))
    return reading


def _by_sources(plan: LoadPlan, names: set[str]) -> Iterator[list[str]]:
    """Names in groups that are made of the same stored tensors, so that none is read twice."""
    groups: dict[frozenset[str], list[str]] = {}
    for name in sorted(names):
        groups.setdefault(plan.tensors[name].sources, []).append(name)
    yield from groups.values()


def _chunks(piece: Piece, itemsize: int) -> Iterator[Piece]:
    """The piece in parts of at most `CHUNK` bytes, cut along the slowest dimension of the file."""
    if prod(piece.shape) * itemsize <= CHUNK:
        yield piece
        return
    along = min((dim, k) for k, dim in enumerate(piece.dims) if dim is not None)[1]
    half = piece.shape[along] // 2
    for start, extent in ((0, half), (half, piece.shape[along] - half)):
        offset = (*piece.offset[:along], piece.offset[along] + start, *piece.offset[along + 1 :])
        shape = (*piece.shape[:along], extent, *piece.shape[along + 1 :])
        yield from _chunks(piece.cut(Box(offset, shape)), itemsize)


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _bytes_of(tensor: Tensor) -> memoryview:
    """The elements' bytes, row-major; the tensor's own memory if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())


def _num_threads() -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_THREADS, (os.cpu_count() or 1) // local_ranks))
