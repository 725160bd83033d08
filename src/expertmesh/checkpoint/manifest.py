"""`expertmesh.json`: what a checkpoint consists of, so that a missing, cut or altered file is found and named."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from torch.distributed import ProcessGroup

from expertmesh.checkpoint.agree import agreed
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather, world

MANIFEST = "expertmesh.json"
FORMAT_VERSION = 1
_BLOCK = 8 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes, and its CRC-32 as 8 hexadecimal digits (None where its tensors have their own)."""

    size: int
    crc32: str | None


@dataclass(frozen=True)
class Manifest:
    """The content of `expertmesh.json`.

    Attributes:
        versions: of expertmesh, torch and transformers that wrote the checkpoint.
        mesh: sizes of the axes it was trained on: dp_replicate, dp_shard, efsdp, ep, world_size.
        step: optimizer steps done, if known.
        tensors: the CRC-32 of every tensor of the model files, 8 hexadecimal digits, by its name in the files.
        files: every other file of the checkpoint, by its path in the folder with `/` as separator.
    """

    versions: dict[str, str] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    tensors: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest.

        Raises:
            CheckpointError: there is none, it is damaged, a newer expertmesh wrote it, or it names files elsewhere.
        """
        path = Path(folder, MANIFEST)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}.") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}.") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}. Resume from another checkpoint.") from error
        return cls._from_json(content, path)

    @classmethod
    def _from_json(cls, content: object, path: Path) -> Manifest:
        version = content.get("format_version") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise CheckpointError(f"{path} is damaged: it has no format_version. Resume from another checkpoint.")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format {version}, and this expertmesh reads up to {FORMAT_VERSION}: upgrade expertmesh."
            )
        try:
            fields = {name: content[name] for name in ("versions", "mesh", "step", "tensors")}
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            sizes_are_whole = all(isinstance(entry.size, int) for entry in files.values())
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}. Resume from another checkpoint.") from error
        if not sizes_are_whole:
            raise CheckpointError(f"{path} is damaged: a size is no whole number. Resume from another checkpoint.")
        for name in files:
            if not _stays_inside(name):
                raise CheckpointError(f"{path} names the file {name!r}, which is outside its folder.")
        return cls(**fields, files=files)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, durably and at once: it is there as a whole or not at all."""
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        temporary = Path(folder, f"{MANIFEST}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, Path(folder, MANIFEST))

    def misfits(self, folder: Path) -> list[str]:
        """What does not fit in a folder, a line for each file that is missing or has another size; no file is read."""
        problems = []
        for name, entry in sorted(self.files.items()):
            path = Path(folder, name)
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                problems.append(f"{path} is missing")
            elif size != entry.size:
                problems.append(f"{path} has {size} bytes instead of {entry.size}")
        return problems


def describe_files(folder: Path, group: ProcessGroup | None = None) -> dict[str, FileEntry]:
    """Sizes and checksums of all files of a folder but its manifest. Collective: each rank reads a share of them.

    The folder has to be complete and the same for all ranks. Model files (`model*.safetensors`) get no checksum: their
    tensors have one each.

    Raises:
        CheckpointError: a file cannot be read; on every rank.
    """
    rank, _ = world(group)
    sizes: dict[str, int] = {}
    with agreed(f"list the files of {folder}", group):
        if rank == 0:
            sizes = {name: path.stat().st_size for name, path in sorted(_files(folder).items()) if name != MANIFEST}
    sizes = gather(sizes, group)[0]
    checksums = _checksums(folder, {name: size for name, size in sizes.items() if _is_checked(name)}, group)
    return {name: FileEntry(size, checksums.get(name)) for name, size in sizes.items()}


def verify_files(folder: Path, group: ProcessGroup | None = None) -> Manifest:
    """Compare a folder with its manifest: all sizes, and all checksums but those of tensors. Collective.

    Files that the manifest does not name are somebody else's and not looked at. Each rank reads a share.

    Returns:
        The manifest.

    Raises:
        CheckpointError: no or a damaged manifest, or files that do not fit it, by name; the same on every rank.
    """
    with agreed(f"verify {folder}", group):
        manifest = Manifest.read(folder)
        problems = manifest.misfits(folder)
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}. The checkpoint is damaged: resume from another one.")
    expected = {name: entry for name, entry in manifest.files.items() if entry.crc32 is not None}
    found = _checksums(folder, {name: entry.size for name, entry in expected.items()}, group)
    damaged = [str(Path(folder, name)) for name, entry in sorted(expected.items()) if found[name] != entry.crc32]
    if damaged:
        raise CheckpointError(
            f"{', '.join(damaged)}: the content is not what was written (its checksum differs). "
            f"The checkpoint is damaged: resume from another one."
        )
    return manifest


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _is_checked(name: str) -> bool:
    return re.fullmatch(r"(.*/)?model(-\d+-of-\d+)?\.safetensors", name) is None


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}


def _checksums(folder: Path, sizes: Mapping[str, int], group: ProcessGroup | None) -> dict[str, str]:
    """The CRC-32 of the named files, read once in total: the largest first, each by the rank with least to do."""
    rank, size = world(group)
    loads = [0] * size
    mine: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[name]
        if owner == rank:
            mine.append(name)
    checksums: dict[str, str] = {}
    with agreed(f"read the files of {folder}", group):
        checksums = {name: file_checksum(Path(folder, name)) for name in mine}
    merged: dict[str, Any] = {}
    for share in gather(checksums, group):
        merged.update(share)
    return merged


def file_checksum(path: Path) -> str:
    """The CRC-32 of a file's bytes, as 8 hexadecimal digits."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"
