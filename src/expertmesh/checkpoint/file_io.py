"""Files that are read and written at given places, by several threads and ranks at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.checkpoint.safetensors_format import StoredTensor
from expertmesh.errors import CheckpointError

# Bounds what reading and writing need beside the weights themselves, in bytes and for each thread.
CHUNK = 16 << 20
_THREADS = 4


class InputFiles:
    """Files to read from, opened when needed and closed at the end of a `with` block. Not for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, stored: StoredTensor, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with a stored tensor's bytes from its byte `start` on.

        Raises:
            CheckpointError: the file ends too early.
            OSError: it cannot be opened or read.
        """
        if stored.path not in self._descriptors:
            self._descriptors[stored.path] = os.open(stored.path, os.O_RDONLY)
        position, done = stored.offset + start, 0
        while done < len(buffer):
            count = os.preadv(self._descriptors[stored.path], [buffer[done:]], position + done)
            if count == 0:
                raise CheckpointError(
                    f"{stored.path} ends inside {stored.name}: it is truncated. Use another checkpoint, or fetch "
                    f"the file again."
                )
            done += count


class OutputFiles:
    """Existing files of one folder to write parts of, closed at the end of a `with` block."""

    def __init__(self, folder: Path, filenames: Iterable[str]) -> None:
        self._descriptors = {Path(name): os.open(folder / name, os.O_WRONLY) for name in filenames}

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def write(self, stored: StoredTensor, start: int, run: memoryview) -> None:
        """Put bytes into a stored tensor, from its byte `start` on."""
        position, done = stored.offset + start, 0
        while done < len(run):
            done += os.pwrite(self._descriptors[stored.path], run[done:], position + done)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)


def create_file(path: Path, content: bytes, nbytes: int | None = None) -> None:
    """Make a file that begins with `content` and is `nbytes` long; it is on the disk when this returns."""
    with path.open("wb") as output:
        output.write(content)
        output.truncate(len(content) if nbytes is None else nbytes)
        output.flush()
        os.fsync(output.fileno())


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements' bytes, row-major; the tensor's own memory if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())


def num_threads() -> int:
    """How many threads one rank may keep busy with files."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_THREADS, (os.cpu_count() or 1) // local_ranks))
