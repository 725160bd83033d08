"""The errors a user can cause, and how they are shown: once per job, in one line, with the remedy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType

# sysexits.h EX_CONFIG. A launcher can tell a refused configuration from a crash by it.
CONFIG_EXIT_CODE = 78
_NAMES_SHOWN = 5
_SECONDS_FOR_RANK_0 = 10


class ExpertMeshError(ValueError):
    """Something the user asked for cannot work. The message says what, where, and what to change."""


class ConfigError(ExpertMeshError):
    """A choice in the configuration (YAML, environment or keyword arguments) cannot work."""


class ModelError(ExpertMeshError):
    """The model at hand cannot be trained the way the configuration asks for."""


class CheckpointError(ExpertMeshError):
    """A checkpoint cannot be written, or what is there cannot be read back as it was written."""


def some(names: Sequence[str]) -> str:
    """The first few of many names, and how many more there are, for a message of one line."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def install_one_line_reports() -> None:
    """Make an uncaught `ExpertMeshError` end a launched job with one line from rank 0 instead of a traceback a rank.

    Every rank exits with `CONFIG_EXIT_CODE`. Other exceptions keep their tracebacks. Another rank than 0 speaks only if
    rank 0 has not ended the job by then: torchrun stops all ranks as soon as one exits.
    """
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, ExpertMeshError):
            previous(kind, error, traceback)
            return
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_RANK_0)
        # torch.distributed wraps this hook and collects what it writes to `sys.stderr` until it returns; it will not.
        print(f"expertmesh: {error}", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        # An exception hook cannot choose the exit status, and an orderly shutdown would wait for ranks that are
        # leaving too.
        os._exit(CONFIG_EXIT_CODE)

    sys.excepthook = report
