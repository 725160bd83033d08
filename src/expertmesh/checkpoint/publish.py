"""A checkpoint appears as a whole or not at all: it is written beside its place and renamed when it is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import TracebackType

from torch.distributed import ProcessGroup

from expertmesh.checkpoint.agree import agree, agreed
from expertmesh.checkpoint.manifest import Manifest
from expertmesh.checkpoint.swap import aside_of, finish, flush_tree, put_in_place
from expertmesh.errors import CheckpointError
from expertmesh.ranks import world

_PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Publication:
    """A folder that is being written. Collective: all ranks construct, commit and abort it together.

    As a context manager it commits at the end of the block; if any rank raised in the block, nothing is published, what
    was written is removed, and every rank raises the same error.

    Attributes:
        final: where the folder will be, with symbolic links resolved.
        folder: the staging folder `NAME.partial` beside it, new and empty.
        content: what becomes `final`: `folder`, or `folder / inner`, which is not created.

    Raises:
        CheckpointError: the folder cannot be created, or not all ranks see it; on every rank.
    """

    def __init__(self, final: Path, group: ProcessGroup | None = None, inner: str | None = None) -> None:
        self.final = Path(os.path.realpath(final))
        self.group = group
        self.folder = self.final.with_name(self.final.name + _PARTIAL)
        self.content = self.folder if inner is None else self.folder / inner
        self._rank, _ = world(group)
        with agreed(f"prepare to write {self.final}", group):
            if self._rank == 0:
                self._prepare()
        with agreed(f"write {self.final}", group):
            if not self.folder.is_dir():
                raise CheckpointError(
                    f"{self.folder} is not visible here; checkpoints need a folder that all nodes share."
                )

    def commit(self) -> None:
        """Put the content in place of `final`, durably. What no checkpoint wrote in a previous `final` is kept.

        Raises:
            CheckpointError: it could not be published; on every rank. A previous `final` is still there then.
        """
        with agreed(f"write {self.final} to the disk", self.group):
            if not self.content.is_dir():
                raise CheckpointError(f"nothing was written into {self.content}.")
            # Unwritten pages are a node's, so one rank a node flushes those of all its ranks.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                flush_tree(self.content)
        with agreed(f"publish {self.final}", self.group):
            if self._rank == 0:
                put_in_place(self.content, self.final)
                shutil.rmtree(self.folder, ignore_errors=True)

    def abort(self) -> None:
        """Remove what was written so far. Call it when no rank writes any more; it raises nothing."""
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            # An interrupted process cannot wait for the others to agree.
            self.abort()
            return
        try:
            agree(error, f"write {self.final}", self.group)
            self.commit()
        except CheckpointError:
            self.abort()
            raise

    def _prepare(self) -> None:
        if os.path.lexists(self.final) and not self.final.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is a file", str(self.final))
        if os.path.ismount(self.final):
            raise CheckpointError(f"{self.final} is a mount point and cannot be replaced: choose a folder inside it.")
        self.final.parent.mkdir(parents=True, exist_ok=True)
        finish(self.final)
        if os.path.lexists(self.folder):
            shutil.rmtree(self.folder)
        self.folder.mkdir()


def resolve(final: Path) -> Path:
    """Where a published folder is at this moment: `final`, or beside it if a kill came between the two renames."""
    final = Path(final)
    aside = aside_of(final)
    return aside if aside.is_dir() and not os.path.lexists(final) else final


def incomplete(folder: Path) -> list[Path]:
    """What unfinished writing has left beside and in a folder, for a report."""
    folder = Path(folder)
    beside = folder.with_name(folder.name + _PARTIAL)
    return [path for path in (beside, *sorted(folder.glob(f"*{_PARTIAL}"))) if path.is_dir()]


def latest(folder: Path) -> Path | None:
    """The complete `checkpoint-N` of a folder with the highest N, or None.

    Complete means: its manifest can be read and all files it names have their sizes.
    """
    folder = Path(folder)
    steps = {int(match[1]) for path in folder.glob("checkpoint-*") if (match := _CHECKPOINT.match(path.name))}
    for step in sorted(steps, reverse=True):
        candidate = resolve(folder / f"checkpoint-{step}")
        if _is_complete(candidate):
            return candidate
    return None


def _is_complete(folder: Path) -> bool:
    try:
        return not Manifest.read(folder).misfits(folder)
    except CheckpointError:
        return False
