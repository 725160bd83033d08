"""Folders in an object store, by any URL that fsspec knows.

Such a store takes a file from its first byte to its last and from one writer, so a rank cannot put its bytes into place
there: each file is written by one rank, to which the others send their parts, a tensor at a time. Nor can a folder be
renamed: the index of the weights is written last, and without it there is no model.
"""

from __future__ import annotations

import fnmatch
import shutil
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import fsspec
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from expertmesh.checkpoint.agree import agree, agreed
from expertmesh.checkpoint.description import write_description
from expertmesh.checkpoint.file_io import bytes_of
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.safetensors_format import INDEX_FILE, PlannedFile, StoredTensor, index_json
from expertmesh.checkpoint.writer import MAX_SHARD_SIZE, Weights, write_piece
from expertmesh.errors import CheckpointError
from expertmesh.ranks import world

_MODEL_FILES = (MANIFEST, INDEX_FILE, "model*.safetensors", "pytorch_model*.bin", "pytorch_model.bin.index.json")
FALLBACK = "an object store takes no byte ranges: one rank writes each file, from its first byte to its last"


def is_url(folder: Path | str) -> bool:
    """Whether a folder is a URL and no path."""
    return "://" in str(folder)


class ObjectStoreFolder:
    """A folder of an object store.

    Raises:
        CheckpointError: nothing that is installed handles such a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url} cannot be opened: {error}. Install what fsspec needs for it.") from error

    def open(self, name: str) -> BinaryIO:
        """A new file to write from its first byte to its last."""
        self._files.makedirs(self._root, exist_ok=True)
        return self._files.open(f"{self._root}/{name}", "wb")

    def put(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self.open(name) as file:
            file.write(content)

    def put_files(self, folder: Path) -> None:
        """Copy all files of a local folder."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            with path.open("rb") as source, self.open(name) as target:
                shutil.copyfileobj(source, target)

    def remove_model(self) -> None:
        """Remove the weights that are there, index first, so that no reader prefers them to new ones."""
        found = [] if self.is_empty() else self._files.ls(self._root, detail=False)
        names = [path.rsplit("/", 1)[-1] for path in found]
        for pattern in _MODEL_FILES:
            for name in fnmatch.filter(names, pattern):
                self._files.rm(f"{self._root}/{name}")

    def is_empty(self) -> bool:
        """Whether no file is there."""
        return not self._files.exists(self._root) or not self._files.find(self._root)


def write_model_to_url(model: nn.Module, url: str, *, max_shard_size: int = MAX_SHARD_SIZE) -> None:
    """Write a model as a Hugging Face folder of an object store. Collective. Rank 0 says that it takes longer.

    Raises:
        CheckpointError: on every rank; what was written by then stays there, without an index.
    """
    if world()[0] == 0:
        print(f"expertmesh: {url}: {FALLBACK}.", flush=True)
    write_weights_to_url(Weights.of(model), url, max_shard_size=max_shard_size)
    with agreed(f"write the model's configuration to {url}"):
        if world()[0] == 0:
            with tempfile.TemporaryDirectory() as folder:
                write_description(model, Path(folder))
                ObjectStoreFolder(url).put_files(Path(folder))


def write_weights_to_url(
    weights: Weights, url: str, *, max_shard_size: int = MAX_SHARD_SIZE, group: ProcessGroup | None = None
) -> None:
    """Write safetensors files and their index. Collective over `group`.

    As many files are under way as there are ranks. A rank holds one stored tensor beside its own shards.

    Raises:
        CheckpointError: on every rank, if one cannot write, or if the ranks' parts do not make up a tensor.
    """
    rank, size = world(group)
    files = weights.plan(max_shard_size)
    with agreed(f"open {url}", group):
        folder = ObjectStoreFolder(url)
        if rank == 0:
            folder.remove_model()
    for first in range(0, len(files), size):
        _write_together(weights, files[first : first + size], folder, group)
    with agreed(f"write the index to {url}", group):
        if rank == 0:
            folder.put(INDEX_FILE, index_json(files).encode())


def in_file_order(file: PlannedFile) -> list[StoredTensor]:
    """A file's tensors from its first byte to its last."""
    return sorted(file.tensors.values(), key=lambda stored: (stored.offset, stored.nbytes))


def _write_together(
    weights: Weights, files: list[PlannedFile], folder: ObjectStoreFolder, group: ProcessGroup | None
) -> None:
    """Write one file a rank."""
    rank, _ = world(group)
    upload = _Upload(folder, files[rank]) if rank < len(files) else None
    for tensors in zip_longest(*map(in_file_order, files)):
        for writer, stored in enumerate(tensors):
            if stored is None:
                continue
            runs = _gather_to(writer, _own_runs(weights, stored), group)
            if writer == rank:
                upload.write_tensor(stored, runs)
    if upload is not None:
        upload.close()
    agree(upload and upload.failure, f"write the weights to {folder.url}", group)


class _Upload:
    """A file on its way. After a failure it takes what else comes and drops it, so that the ranks stay in step."""

    def __init__(self, folder: ObjectStoreFolder, file: PlannedFile) -> None:
        self.failure: Exception | None = None
        self._output: BinaryIO | None = None
        try:
            self._output = folder.open(file.filename)
            self._output.write(file.header)
        except Exception as error:
            self.failure = error

    def write_tensor(self, stored: StoredTensor, runs: list[tuple[int, bytes]]) -> None:
        if self.failure is not None:
            return
        try:
            position = 0
            for start, run in sorted(runs):
                if start != position:
                    break
                self._output.write(run)
                position += len(run)
            if position != stored.nbytes:
                raise CheckpointError(f"the ranks' parts of {stored.name} do not make up the whole tensor.")
        except Exception as error:
            self.failure = error

    def close(self) -> None:
        try:
            if self._output is not None:
                self._output.close()
        except Exception as error:
            self.failure = self.failure or error


class _Runs:
    """Collects bytes instead of writing them."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, bytes]] = []

    def write(self, stored: StoredTensor, start: int, run: memoryview) -> None:
        self.runs.append((start, bytes(run)))


def _own_runs(weights: Weights, stored: StoredTensor) -> list[tuple[int, bytes]]:
    """What this rank has of a stored tensor: first byte, and bytes."""
    if stored.name in weights.converted:
        return [(0, bytes(bytes_of(weights.converted[stored.name])))]
    collected, traced = _Runs(), weights.tensors[stored.name]
    for piece in () if traced.opaque else traced.pieces:
        if piece.source in weights.shards:
            for _ in write_piece(collected, stored, piece, weights.shards[piece.source]):
                pass
    return collected.runs


def _gather_to(writer: int, runs: list[tuple[int, bytes]], group: ProcessGroup | None) -> list[tuple[int, bytes]]:
    """All ranks' runs, on the writer; nothing on the others."""
    rank, size = world(group)
    if size == 1:
        return runs
    gathered: list | None = [None] * size if rank == writer else None
    dist.gather_object(runs, gathered, group=group, group_dst=writer)
    return [run for runs in gathered or () for run in runs]
