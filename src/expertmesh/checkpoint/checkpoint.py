"""One checkpoint from its first file to its name: collected, written by all ranks at once, published when complete.

`Checkpoint` collects what is to be written and `commit`s it. Written in the background, training goes on as soon as the
weights and the optimizer state have been copied; the writing thread has a process group of its own, so that its
collectives and those of the training do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.checkpoint import dcp
from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.description import write_description
from expertmesh.checkpoint.manifest import Manifest, describe_files
from expertmesh.checkpoint.object_store import is_url, write_model_to_url
from expertmesh.checkpoint.optimizer import ACCELERATE_FOLDER, OPTIMIZER_FOLDER, OptimizerStage
from expertmesh.checkpoint.publish import Publication
from expertmesh.checkpoint.writer import MAX_SHARD_SIZE, Weights, write_weights
from expertmesh.ranks import world

FORMATS = ("hf", "dcp")
_PACKAGES = ("expertmesh", "torch", "transformers")


class Stage(Protocol):
    """Something taken from the training at one moment, to be written later."""

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> Mapping[str, str] | None:
        """Write it into `folder`. Collective over `group`. Returns the checksums of stored tensors, if any, by name."""


class ModelStage:
    """A model's weights and what makes their folder a Hugging Face model.

    Args:
        model: sharded or whole.
        copy: whether the model may change before `write`.
    """

    def __init__(self, model: nn.Module, copy: bool, max_shard_size: int = MAX_SHARD_SIZE) -> None:
        self._model = model
        self._weights = Weights.of(model, copy=copy)
        self._max_shard_size = max_shard_size

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> dict[str, str]:
        """Write the files. Collective over `group`; see `write_weights`."""
        checksums = write_weights(self._weights, folder, max_shard_size=self._max_shard_size, group=group)
        with agreed(f"write the model's configuration to {folder}", group):
            if world(group)[0] == 0:
                write_description(self._model, folder)
        return checksums


class Checkpoint:
    """A checkpoint being written. All methods are collective.

    Args:
        final: the folder it is to become; whatever is there stays until the new one is complete.
        inner: files are written to this sub-folder of `folder`, which alone becomes `final`.
        asynchronous: write in the background.
        format: `hf`, or `dcp` for the layout that Accelerate writes with FSDP2 and `SHARDED_STATE_DICT`.
        max_shard_size: of a weight file, in bytes.

    Raises:
        CheckpointError: on every rank: the folder cannot be made, or the last background checkpoint failed.
    """

    def __init__(
        self,
        final: Path | str,
        inner: str | None = None,
        *,
        asynchronous: bool = False,
        format: str = "hf",
        max_shard_size: int = MAX_SHARD_SIZE,
    ) -> None:
        wait_for_checkpoints()
        self._asynchronous = asynchronous
        self._format = format
        self._max_shard_size = max_shard_size
        self._group = _background_group() if asynchronous else None
        self._publication = Publication(Path(final), self._group, inner)
        self._stages: list[tuple[Stage, str]] = []

    @property
    def folder(self) -> Path:
        """Where small files may be put at once, by any rank, until `commit`."""
        return self._publication.folder

    def add_model(self, model: nn.Module, subfolder: str = "") -> None:
        """Take a model's weights as they are now."""
        if self._format == "dcp":
            stage: Stage = dcp.ModelStage(model, copy=self._asynchronous)
            subfolder = str(Path(subfolder, dcp.MODEL_FOLDER))
        else:
            stage = ModelStage(model, self._asynchronous, self._max_shard_size)
        self._stages.append((stage, subfolder))

    def add_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, subfolder: str = "") -> None:
        """Take an optimizer's state as it is now; `model` gives its parameters their names."""
        name = ACCELERATE_FOLDER if self._format == "dcp" else OPTIMIZER_FOLDER
        stage = OptimizerStage(model, optimizer, copy=self._asynchronous)
        self._stages.append((stage, str(Path(subfolder, name))))

    def commit(
        self,
        step: int | None = None,
        mesh: Mapping[str, int] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Write everything and publish it.

        Args:
            step: optimizer steps done, for the manifest.
            mesh: sizes of the mesh axes, for the manifest.
            after: called on rank 0 once the checkpoint is published.

        Raises:
            CheckpointError: on every rank; nothing was published and nothing before it was touched. A background
                failure is raised by the next `Checkpoint` or by `wait_for_checkpoints`.
        """

        def finish() -> None:
            try:
                self._write(step, dict(mesh or {}))
            except BaseException:
                self.abort()
                raise
            with agreed("finish the checkpoint", self._group):
                if after is not None and world(self._group)[0] == 0:
                    after()

        if self._asynchronous:
            _Background.start(finish)
        else:
            finish()

    def abort(self) -> None:
        """Leave no trace of it."""
        self._publication.abort()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _write(self, step: int | None, mesh: dict[str, int]) -> None:
        root = self._publication.content
        tensors: dict[str, str] = {}
        for stage, subfolder in self._stages:
            with agreed(f"create {root / subfolder}", self._group):
                (root / subfolder).mkdir(parents=True, exist_ok=True)
            checksums = stage.write(root / subfolder, self._group) or {}
            tensors.update({str(PurePosixPath(subfolder, name)): crc for name, crc in checksums.items()})
        files = describe_files(root, self._group)
        versions = {package: version(package) for package in _PACKAGES}
        with agreed(f"write the manifest of {root}", self._group):
            if world(self._group)[0] == 0:
                Manifest(versions, mesh, step, tensors, files).write(root)
        self._publication.commit()


def save_model(model: nn.Module, folder: Path | str, *, max_shard_size: int = MAX_SHARD_SIZE) -> None:
    """Write a model as an ordinary Hugging Face folder, straight from its shards. Collective.

    Other files that the folder has stay there. It may be a URL that fsspec knows, see `object_store`.

    Raises:
        CheckpointError: on every rank; the folder is as it was.
    """
    if is_url(folder):
        write_model_to_url(model, str(folder), max_shard_size=max_shard_size)
        return
    with Checkpoint(folder, max_shard_size=max_shard_size) as checkpoint:
        checkpoint.add_model(model)
        checkpoint.commit()


def wait_for_checkpoints() -> None:
    """Wait for the checkpoint that is being written in the background.

    Raises:
        CheckpointError: it could not be written; on every rank.
    """
    _Background.wait()


class _Background:
    """The one checkpoint that may be under way."""

    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    @classmethod
    def start(cls, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                cls._error = error

        # Not a daemon: a script that ends without waiting still gets its checkpoint.
        cls._thread = threading.Thread(target=run, name="expertmesh-checkpoint")
        cls._thread.start()

    @classmethod
    def wait(cls) -> None:
        if cls._thread is not None:
            cls._thread.join()
        error, cls._thread, cls._error = cls._error, None, None
        if error is not None:
            raise error


@cache
def _background_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.is_initialized() else None
