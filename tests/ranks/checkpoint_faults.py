"""Damaged checkpoints are refused by the name of the file, and a save that fails harms nothing.

Arguments: folder, `damage`, `refused` or `full`. For `full`, `folder/weights` and `folder/optimizer` are file systems
that have no room for the weights and, after these, for the optimizer's state.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch.distributed as dist

from expertmesh.checkpoint import latest, wait_for_checkpoints
from expertmesh.checkpoint.manifest import verify_files
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather
from ranks.checkpoint_crash import RANKS, Training
from ranks.forked import Ranks, Say
from ranks.models import build

NOBODY = 65534


def refusal(action: Callable[[], object], *words: str) -> None:
    """The same single line on every rank, with these words in it."""
    try:
        action()
        message = ""
    except CheckpointError as error:
        message = str(error)
    everywhere = set(gather(message))
    assert len(everywhere) == 1, everywhere
    assert message and "\n" not in message and all(word in message for word in words), (message, words)


def on_rank_0(action: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def no_json(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"?")


def damage(folder: Path, say: Say) -> None:
    training = Training()
    training.step(1)
    training.save(folder / "checkpoint-1", 1, asynchronous=False)
    training.save(folder / "checkpoint-2", 2, asynchronous=False)
    weights = sorted(path.name for path in (folder / "checkpoint-2").glob("model-*.safetensors"))
    states = sorted(path.name for path in (folder / "checkpoint-2" / "optimizer").glob("*.distcp"))
    assert len(weights) > 2 and len(states) == RANKS

    def damaged(name: str, how: Callable[[Path], object]) -> Path:
        copy = folder / "checkpoint-3"

        def make() -> None:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder / "checkpoint-2", copy)
            how(copy / name)

        on_rank_0(make)
        return copy

    for weight in (weights[0], weights[-1]):
        for how in (partial(flip, position=-1), partial(flip, position=-5000), partial(cut, size=-8)):
            refusal(partial(training.load, damaged(weight, how)), weight)
        for how in (partial(cut, size=5), partial(cut, size=40), no_json):
            refusal(partial(training.load, damaged(weight, how)), weight)
    for state in states:
        for how in (partial(flip, position=-1), partial(flip, position=-5000), partial(cut, size=-8)):
            refusal(partial(verify_files, damaged(f"optimizer/{state}", how)), state)
        refusal(partial(training.load, damaged(f"optimizer/{state}", partial(cut, size=100))), "optimizer")
    refusal(partial(training.load, damaged("optimizer/.metadata", partial(cut, size=30))), "optimizer")
    for name in (weights[0], "model.safetensors.index.json", f"optimizer/{states[0]}", "expertmesh.json"):
        damaged(name, partial(cut, size=-8))
        assert latest(folder) == folder / "checkpoint-2", "what is cut is not the latest"
    assert training.load(folder / "checkpoint-2") == 2


@contextmanager
def without_rights() -> Iterator[None]:
    """As somebody who may not write there, if this is root, who may everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield
    if root:
        os.seteuid(0)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """On one rank; the others may write what they like."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def goes_on(training: Training, number: int, folder: Path) -> None:
    """After a save that failed: train, save elsewhere, and resume from there."""
    training.step(number)
    after, elsewhere = training.fingerprint(), folder / f"elsewhere-{number}"
    training.save(elsewhere, number, asynchronous=False)
    fresh = Training()
    assert fresh.load(elsewhere) == number and fresh.fingerprint() == after


def same_as_without_faults(training: Training, steps: int) -> None:
    undisturbed = Training()
    for number in range(1, steps + 1):
        undisturbed.step(number)
    assert training.fingerprint() == undisturbed.fingerprint(), "a save that failed has changed the training"


def refused(folder: Path, say: Say) -> None:
    def prepare() -> None:
        (folder / "file").write_text("here already")
        (folder / "forbidden").mkdir(mode=0o555)

    on_rank_0(prepare)
    training = Training()
    training.step(1)
    training.save(folder / "checkpoint-1", 1, asynchronous=False)
    cases = [
        (nullcontext(), "file", "file is where a folder has to be"),
        (nullcontext(), "file/checkpoint-2", "file is where a folder has to be"),
        (without_rights(), "forbidden/checkpoint-2", "Permission denied"),
        (files_of_at_most(4096), "checkpoint-2", "rank 1 of 2"),
    ]
    for number, (fault, name, reason) in enumerate(cases, start=2):
        with fault:
            refusal(partial(training.save, folder / name, number, False), str(folder / name), reason)
        goes_on(training, number, folder)
    same_as_without_faults(training, number)
    assert (folder / "file").read_text() == "here already"
    names = {path.name for path in folder.iterdir() if not path.name.startswith("elsewhere")}
    assert names == {"file", "forbidden", "checkpoint-1", "store"}, names
    assert latest(folder) == folder / "checkpoint-1"


def full(folder: Path, say: Say) -> None:
    training = Training()
    training.step(1)
    number = 1
    for name in ("weights", "optimizer"):
        for asynchronous in (False, True):
            number += 1
            final = folder / name / f"checkpoint-{number}"

            def save(final: Path = final, number: int = number, asynchronous: bool = asynchronous) -> None:
                training.save(final, number, asynchronous)
                wait_for_checkpoints()

            refusal(save, str(final), "No space left on device", "Free some space")
            assert gather(list((folder / name).iterdir())) == [[]] * RANKS, "nothing takes up the space any more"
            goes_on(training, number, folder)
    same_as_without_faults(training, number)


if __name__ == "__main__":
    build(num_hidden_layers=1)
    folder = Path(sys.argv[1])
    work = {"damage": damage, "refused": refused, "full": full}[sys.argv[2]]
    Ranks(RANKS, folder / "store", partial(work, folder)).finish(120)
