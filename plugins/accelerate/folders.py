"""Which folder `Accelerator.save_state` and `load_state` mean, automatic names and their retention included."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from expertmesh.checkpoint.publish import resolve
from expertmesh.errors import CheckpointError

_NAMED = re.compile(r"checkpoint_(\d+)")


def folder_to_write(accelerator: Accelerator, output_dir: str | None) -> Path:
    """Where a state goes: `output_dir`, or the next `checkpoints/checkpoint_<iteration>` of the project.

    Raises:
        CheckpointError: no folder was given, or the next automatic one exists.
    """
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        if output_dir is None:
            raise CheckpointError(
                "save_state was given no output_dir: pass one, or turn on automatic_checkpoint_naming in the "
                "ProjectConfiguration."
            )
        return Path(output_dir).expanduser()
    folder = _automatic(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists already: set `accelerator.project_configuration.iteration` to the one to start with."
        )
    return folder


def folder_to_read(accelerator: Accelerator, input_dir: str | None) -> Path:
    """The complete state to read: `input_dir`, or the newest of the project's automatic ones.

    Raises:
        CheckpointError: there is none.
    """
    if input_dir is not None:
        return resolve(Path(input_dir).expanduser())
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise CheckpointError("load_state was given no input_dir, and automatic_checkpoint_naming is off: pass one.")
    complete = _complete(_automatic(accelerator))
    if not complete:
        raise CheckpointError(f"there is no checkpoint in {_automatic(accelerator)}: pass the folder of one.")
    return complete[-1]


def retention(accelerator: Accelerator) -> Callable[[], None] | None:
    """What removes the oldest automatic checkpoints beyond `total_limit`, to be called once the new one is complete."""
    configuration = accelerator.project_configuration
    limit = configuration.total_limit
    if not configuration.automatic_checkpoint_naming or limit is None:
        return None
    folder = _automatic(accelerator)

    def remove_the_oldest() -> None:
        for old in _complete(folder)[: -max(limit, 1)]:
            shutil.rmtree(old)

    return remove_the_oldest


def _automatic(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def _complete(folder: Path) -> list[Path]:
    """Automatic checkpoints, oldest first; one that is still being written has another name."""
    if not folder.is_dir():
        return []
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAMED.fullmatch(path.name))}
    return [found[iteration] for iteration in sorted(found)]
