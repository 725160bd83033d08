"""The checkpoints of a fine-tune: who writes them, which one to go on from, and which ones to do away with."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.publish import incomplete, latest, resolve
from expertmesh.config import ENV_PREFIX
from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import AUTO, CHECKPOINT, NONE, Recipe
from expertmesh.plugins import load_plugin
from expertmesh.ranks import gather, world


def parallelism_of(recipe: Recipe) -> Any:
    """What lets Trainer write and read expertmesh's checkpoints: an `ExpertMeshConfig` for this launch.

    A launch with expert parallelism has one anyway. One process gets one too, so that a checkpoint is the same on both,
    and either resumes the other's. None for several processes without expert parallelism, which stay what they are.

    Raises:
        ConfigError: these are to write or read checkpoints.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and f"{ENV_PREFIX}EP_SIZE" not in os.environ:
        if recipe.save_steps or recipe.resume != NONE:
            raise ConfigError(
                "save_steps and resume need a launch that expertmesh is part of: set "
                "`parallelism_config_ep_size` in the launch configuration; 1 is FSDP2 without expert parallelism."
            )
        return None
    return load_plugin("accelerate").ExpertMeshConfig(ep_async_save=recipe.save_async or None)


def checkpoint_to_resume(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from, which rank 0 chooses for all, and says so. Collective."""
    if recipe.resume == NONE:
        return None
    if recipe.resume != AUTO:
        return resolve(Path(recipe.resume))
    output, chosen = recipe.output_path, None
    with agreed(f"look for checkpoints in {output}"):
        if world()[0] == 0:
            chosen = latest(output)
            for ignored in _incomplete(output, chosen):
                print(f"note: {ignored} is incomplete and ignored")
            print(f"resuming from {chosen}" if chosen else f"no complete checkpoint in {output}: starting anew")
    return gather(chosen)[0]


def discard_checkpoints(output: Path) -> None:
    """Remove the checkpoints of an earlier run, whole and unfinished ones. On one rank."""
    for path in output.glob(f"{CHECKPOINT}*"):
        shutil.rmtree(path)


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Leave without `folder` if nothing was put there. Trainer makes it before it has anything to put."""
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


def _incomplete(output: Path, newest: Path | None) -> list[Path]:
    """The checkpoints that are newer than the newest complete one, and what unfinished saves have left.

    Of the latter Trainer speaks itself, when it resumes.
    """
    newest_step = -1 if newest is None else _step(newest)
    damaged = [path for path in output.glob(f"{CHECKPOINT}*") if _step(path) > newest_step]
    return [*sorted(damaged, key=_step), *(incomplete(output) if newest is None else ())]


def _step(checkpoint: Path) -> int:
    match = re.fullmatch(rf"{CHECKPOINT}(\d+)(\.replaced)?", checkpoint.name)
    return int(match[1]) if match else -1
