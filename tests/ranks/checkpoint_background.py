"""Ranks that go on training while a checkpoint is written in the background. Arguments: folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave
from models import build

from expertmesh import ExpertParallelConfig, parallelize
from expertmesh.checkpoint import Checkpoint, load_model, load_optimizer, wait_for_checkpoints
from expertmesh.errors import CheckpointError


class SlowDisk:
    """Lets `fsync` wait until the training says so: what is written in the background cannot be finished before."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate
        self.fsync = os.fsync
        os.fsync = self

    def __call__(self, descriptor: int) -> None:
        while not self.gate.exists():
            time.sleep(0.01)
        self.fsync(descriptor)


def train(model, optimizer, steps):
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = parallelize(build(), ExpertParallelConfig(ep_size=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    goes_on_while_it_is_written(model, optimizer, folder)
    failure_is_raised_later_and_harms_nothing(model, optimizer, folder)
    leave()


def goes_on_while_it_is_written(model, optimizer, folder: Path) -> None:
    gate, final = folder / "gate", folder / "checkpoint-2"
    disk = SlowDisk(gate)
    published = []
    with Checkpoint(final, asynchronous=True) as checkpoint:
        (checkpoint.folder / f"small-{dist.get_rank()}.txt").write_text("at once")
        checkpoint.add_model(model)
        checkpoint.add_optimizer(model, optimizer)
        checkpoint.commit(step=2, after=lambda: published.append(final.is_dir()))
    uninterrupted = train(model, optimizer, 3)
    assert not final.exists() and published == [], "nothing is published before everything is on the disk"
    dist.barrier()
    if dist.get_rank() == 0:
        gate.touch()
    wait_for_checkpoints()
    os.fsync = disk.fsync
    assert published == ([True] if dist.get_rank() == 0 else [])
    assert sorted(path.name for path in final.glob("small-*")) == ["small-0.txt", "small-1.txt"]
    load_model(model, final)
    load_optimizer(model, optimizer, final)
    assert train(model, optimizer, 3) == uninterrupted, "it holds the moment it was taken, not a later one"


def failure_is_raised_later_and_harms_nothing(model, optimizer, folder: Path) -> None:
    final = folder / "checkpoint-9"
    with Checkpoint(final, asynchronous=True) as checkpoint:
        checkpoint.add_model(model)
        # Where the weights' index is to be written there is a folder.
        if dist.get_rank() == 0:
            (checkpoint.folder / "model.safetensors.index.json").mkdir()
        checkpoint.commit(step=9)
    train(model, optimizer, 1)
    try:
        wait_for_checkpoints()
    except CheckpointError as error:
        assert "checkpoint-9" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("the failure was not raised")
    dist.barrier()
    assert not final.exists() and not final.with_name("checkpoint-9.partial").exists()
    # The next checkpoint makes that folder again.
    dist.barrier()
    wait_for_checkpoints()
    with Checkpoint(final) as checkpoint:
        checkpoint.add_model(model)
        checkpoint.commit(step=9)
    load_model(model, final)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
