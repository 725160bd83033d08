"""One outcome on every rank: what fails on one rank is raised by all of them, in the same words, and nobody hangs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from expertmesh.errors import CheckpointError, ExpertMeshError
from expertmesh.ranks import gather, world

_FULL = "Free some space there or choose another folder."
_FORBIDDEN = "Give this user the right to write there or choose another folder."
_FILE_IN_THE_WAY = "A file is where a folder has to be: move it away or choose another folder."
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
}


def agree(error: BaseException | None, what: str, group: ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank brings an error. Collective.

    Args:
        error: this rank's failure, if it has one.
        what: what was being done, as it follows "cannot", with the path: `write the checkpoint runs/checkpoint-5`.
        group: the ranks that agree; by default all of them.

    Raises:
        ExpertMeshError: the error itself where all ranks bring the same one.
        CheckpointError: otherwise; the same message on every rank, with the ranks that failed and why.
    """
    rank, size = world(group)
    reports = gather(_reasons(error, rank), group)
    reasons: dict[str, set[int]] = {}
    for report in reports:
        for reason, ranks in report.items():
            reasons.setdefault(reason, set()).update(ranks)
    if not reasons:
        return
    if isinstance(error, ExpertMeshError) and all(list(report) == [str(error)] for report in reports):
        raise error
    raise CheckpointError(f"cannot {what}: {_one_line(reasons, size)}") from error


@contextmanager
def agreed(what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank; whatever any rank raises in it, all ranks raise together, as `agree` does. Collective.

    The block must not leave some ranks waiting in a collective when another one fails: put collectives between blocks.
    """
    failure = None
    try:
        yield
    # What torch's distributed checkpoint raises on all ranks is no `Exception`.
    except (Exception, CheckpointException) as error:
        failure = error
    agree(failure, what, group)


def _reasons(error: BaseException | None, rank: int) -> dict[str, set[int]]:
    """The reasons an error stands for, each with the ranks it happened on."""
    if error is None:
        return {}
    if isinstance(error, CheckpointException):
        reasons: dict[str, set[int]] = {}
        for failed, (cause, _) in error.failures.items():
            reasons.setdefault(_reason(cause), set()).add(failed)
        return reasons
    return {_reason(error): {rank}}


def _reason(error: BaseException) -> str:
    if isinstance(error, ExpertMeshError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}. {_REMEDIES.get(error.errno, '')}".rstrip()
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _one_line(reasons: dict[str, set[int]], size: int) -> str:
    if size == 1:
        return "; ".join(reasons)
    return "; ".join(f"{reason} [{_ranks(ranks, size)}]" for reason, ranks in reasons.items())


def _ranks(ranks: set[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank"
    listed = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{', ...' if len(ranks) > 8 else ''} of {size}"
