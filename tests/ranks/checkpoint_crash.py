"""Train, save after every step, be killed, resume: twenty times. Arguments: folder, seed.

An uninterrupted run first notes what every rank holds after each step. Whatever the later runs resume from has to hold
just that, and what they train then as well. Half of them are killed from outside, all ranks at once, some time after a
save has begun; in the others one rank dies at some file operation of a save, and the rest a moment later.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from expertmesh import ExpertParallelConfig, parallelize
from expertmesh.checkpoint import Checkpoint, latest, load_model, load_optimizer, wait_for_checkpoints
from expertmesh.checkpoint.manifest import Manifest
from expertmesh.checkpoint.publish import incomplete, resolve
from ranks.forked import Ranks, Say
from ranks.models import batches, build

RANKS = 2
KILLS = 20
STEPS = 50
KEPT = 2


class FileOperations:
    """Counts what a process asks of the file system, and may end the process at a certain one."""

    def __init__(self) -> None:
        self.count = 0
        self.counting = False
        self.last: int | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.counting and event.startswith(("open", "os.", "shutil.", "ctypes.")):
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.counting = True
        yield
        self.counting = False


class Training:
    """A tiny model and its optimizer on two ranks."""

    def __init__(self) -> None:
        self.model = parallelize(build(num_hidden_layers=1), ExpertParallelConfig(ep_size=2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> None:
        ids = batches(1, 2, 8, seed=RANKS * number + dist.get_rank())[0]
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self, folder: Path) -> int:
        load_model(self.model, folder)
        load_optimizer(self.model, self.optimizer, folder)
        return Manifest.read(resolve(folder)).step

    def save(self, folder: Path, number: int, asynchronous: bool, after: Callable[[], None] | None = None) -> None:
        with Checkpoint(folder, asynchronous=asynchronous, max_shard_size=20_000) as checkpoint:
            checkpoint.add_model(self.model)
            checkpoint.add_optimizer(self.model, self.optimizer)
            checkpoint.commit(step=number, after=after)

    def fingerprint(self) -> int:
        """Of all bits of the weights and of the optimizer's state that this rank holds."""
        crc = 0
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
                crc = zlib.crc32(local.contiguous().numpy().tobytes(), crc)
        return crc


def uninterrupted(folder: Path, say: Say) -> None:
    """Note every step's fingerprint, and how long a save takes, in seconds and in file operations."""
    training, operations = Training(), FileOperations()
    for number in range(1, STEPS + 1):
        training.step(number)
        say(f"reference {number} {dist.get_rank()} {training.fingerprint()}")
        if number <= 2:
            start = time.monotonic()
            with operations.counted():
                training.save(folder / "measured", number, asynchronous=False)
            took = time.monotonic() - start
    say(f"save {dist.get_rank()} {took} {operations.count // 2}")


def interrupted(
    folder: Path, reference: dict[str, int], last: int, asynchronous: bool, death: tuple[int, int] | None, say: Say
) -> None:
    """Resume and go on to the step `last`. `death`: the rank that dies, and at which file operation of its saves."""
    rank = dist.get_rank()
    operations = FileOperations()
    if death is not None and death[0] == rank:
        operations.last = death[1]
    training = Training()

    def check(number: int, what: str) -> None:
        if training.fingerprint() != reference[f"{number} {rank}"]:
            say(f"wrong: step {number} {what}")

    overwritten = resolve(folder / "last")
    if overwritten.exists():
        check(training.load(folder / "last"), "of the folder that is overwritten each time")
    newest = latest(folder)
    number = 0
    if newest is not None:
        number = training.load(newest)
        check(number, "as loaded")
    else:
        training = Training()
    while number < last:
        number += 1
        training.step(number)
        check(number, "as trained")
        say("saving")
        with operations.counted():
            training.save(
                folder / f"checkpoint-{number}", number, asynchronous, partial(published, folder, number, say)
            )
            training.save(folder / "last", number, asynchronous, partial(say, f"replaced {number}"))
    wait_for_checkpoints()


def published(folder: Path, number: int, say: Say) -> None:
    say(f"published {number}")
    shutil.rmtree(folder / f"checkpoint-{number - KEPT}", ignore_errors=True)


def measure(folder: Path) -> tuple[dict[str, int], float, dict[int, int]]:
    """Fingerprints by step and rank, the seconds that a save takes, and each rank's file operations in one."""
    reference, seconds, operations = {}, [], {}
    for line in Ranks(RANKS, folder / "store", partial(uninterrupted, folder)).finish(120):
        kind, *words = line.split()
        if kind == "reference":
            reference[f"{words[0]} {words[1]}"] = int(words[2])
        else:
            seconds.append(float(words[1]))
            operations[int(words[0])] = int(words[2])
    return reference, max(seconds), operations


def kill_outside(ranks: Ranks, delay: float) -> list[str]:
    """Wait until a save begins, and `delay` seconds more."""
    heard: list[str] = []
    while "saving" not in heard:
        lines = ranks.heard(60)
        if not lines:
            break
        heard += lines
    time.sleep(delay)
    return heard + ranks.kill()


def kill_inside(ranks: Ranks) -> list[str]:
    """Wait until one rank has died, then end the others."""
    heard: list[str] = []
    while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        heard += ranks.heard(0.02)
    return heard + ranks.kill()


def step_of(checkpoint: Path | None) -> int:
    """The step that a folder holds, 0 if it is not there; a folder that is there has to be whole."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    manifest = Manifest.read(checkpoint)
    problems = manifest.misfits(checkpoint)
    assert problems == [], problems
    return manifest.step


def main(folder: Path, seed: int) -> None:
    chooser = random.Random(seed)
    # Nothing is left to import for the ranks then.
    build(num_hidden_layers=1)
    reference, seconds, operations = measure(folder)
    steps, unfinished, wrong, said = [], 0, [], []
    for attempt in range(KILLS):
        # Rank 0 has most to do. After two saves, one of them over another, it begins again.
        rank = chooser.choice([0, 0, 0, 1])
        death = (rank, chooser.randint(1, 2 * operations[rank])) if attempt % 2 else None
        work = partial(interrupted, folder, reference, STEPS, attempt % 4 >= 2, death)
        ranks = Ranks(RANKS, folder / f"store-{attempt}", work)
        said += kill_inside(ranks) if death else kill_outside(ranks, chooser.uniform(0, 2.5 * seconds))
        unfinished += bool(incomplete(folder))
        steps.append(step_of(latest(folder)))
        for word, step in (("published", steps[-1]), ("replaced", step_of(resolve(folder / "last")))):
            done = [int(line.split()[1]) for line in said if line.startswith(word)]
            if done and step < max(done):
                wrong.append(f"kill {attempt}: step {max(done)} was {word}, step {step} is there")
    work = partial(interrupted, folder, reference, steps[-1] + 3, False, None)
    said += Ranks(RANKS, folder / "store-end", work).finish(60)
    wrong += [line for line in said if line.startswith("wrong")]
    left = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "measured")
    print(json.dumps({"wrong": wrong, "steps": steps, "unfinished": unfinished, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
