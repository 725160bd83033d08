"""Whether files are still what they were, and whether every rank has the same ones."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from expertmesh.checkpoint.agree import agreed
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather

# Another revision of a model differs in nearly all its bytes, so a few of them tell.
_SAMPLES = 64
_SAMPLE_BYTES = 512
_RANKS_SHOWN = 8


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """A file's stamp now. Raises OSError."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def refuse_changed(stamps: Mapping[Path, Stamp]) -> None:
    """Refuse to read files that are not the ones that the stamps were taken of.

    Raises:
        CheckpointError: names the first that is gone or has changed.
    """
    for path, stamp in stamps.items():
        try:
            changed = Stamp.of(path) != stamp
        except FileNotFoundError:
            changed = True
        if changed:
            raise CheckpointError(
                f"{path} was changed or removed after from_pretrained, which had left its weights to be read when they "
                f"are needed: keep the file until the model is prepared, or set EXPERTMESH_DEFERRED_LOAD=0."
            )


@dataclass(frozen=True)
class FileIdentity:
    """What two copies of a safetensors file have in common, wherever they are: name, size in bytes, and checksums of
    the header and of samples spread over the rest."""

    name: str
    size: int
    header: int
    samples: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Reads the header and 32 KiB. Raises OSError."""
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = 8 + int.from_bytes(file.read(8), "little")
            header, samples = zlib.crc32(os.pread(file.fileno(), length, 0)), 0
            for k in range(_SAMPLES):
                position = length + (size - length) * k // _SAMPLES
                samples = zlib.crc32(os.pread(file.fileno(), _SAMPLE_BYTES, position), samples)
        return cls(path.name, size, header, samples)


def refuse_differences(files: Mapping[str, Iterable[Path]]) -> None:
    """Refuse to fill one model from different files on different ranks. Collective.

    Args:
        files: for each weight this rank is going to read, its files. Ranks need not have the same weights.

    Raises:
        CheckpointError: on every rank: files cannot be read, or differ; names the ranks and their files.
    """
    paths = {path: index for index, path in enumerate(dict.fromkeys(p for some in files.values() for p in some))}
    with agreed("read the model's weights"):
        identities = [FileIdentity.of(path) for path in paths]
    uses = {weight: tuple(paths[path] for path in some) for weight, some in files.items()}
    ranks = gather(([str(path) for path in paths], identities, uses))
    kinds: dict[str, dict[tuple[FileIdentity, ...], list[int]]] = {}
    for rank, (_, known, used) in enumerate(ranks):
        for weight, indices in used.items():
            kinds.setdefault(weight, {}).setdefault(tuple(known[i] for i in indices), []).append(rank)
    differing = [weight for weight, kind in kinds.items() if len(kind) > 1]
    if not differing:
        return
    example = differing[0]
    places = []
    for some in kinds[example].values():
        names, _, used = ranks[some[0]]
        listed = ", ".join(names[i] for i in used[example])
        places.append(f"rank{'s' if some[1:] else ''} {', '.join(map(str, some[:_RANKS_SHOWN]))}: {listed}")
    raise CheckpointError(
        f"the ranks have different files for the same weights ({example}, and {len(differing) - 1} more): "
        f"{'; '.join(places)}. Give every rank the same revision of the model."
    )
