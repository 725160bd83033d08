"""Adam's state goes from any mesh to any other, bit for bit.

optimizer_state.py save FOLDER   train on each mesh of this world size, write the state, and what it is in full
optimizer_state.py load FOLDER   on each mesh, load everything that is there; compare with what it is in full
optimizer_state.py alone FOLDER  what one rank's trouble looks like on all of them
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from leaving import leave
from models import batches, build
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from expertmesh import ExpertParallelConfig, parallelize
from expertmesh.checkpoint.dcp import load_dcp_model, save_dcp_model
from expertmesh.checkpoint.optimizer import OPTIMIZER_FOLDER, OptimizerStage, load_optimizer
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather, world

# (ep_size, dp_replicate_size) on each world size; ep_size 0 stands for FSDP2 without expertmesh.
MESHES = {1: [(0, 1)], 2: [(1, 1), (2, 1), (0, 1)], 4: [(4, 1), (2, 1), (1, 1), (2, 2)]}
FROZEN = "model.embed_tokens.weight"


def prepared(ep_size, dp_replicate_size):
    """A tiny model on a mesh, and its optimizer with two groups and one frozen parameter."""
    model = build()
    model.get_parameter(FROZEN).requires_grad_(False)
    _, size = world()
    if size > 1 and ep_size == 0:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif size > 1:
        parallelize(model, ExpertParallelConfig(ep_size=ep_size, dp_replicate_size=dp_replicate_size))
    named = dict(model.named_parameters())
    matrices = [parameter for parameter in named.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in named.values() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def train(model, optimizer):
    rank, _ = world()
    for step in batches(2, 4, 8):
        mine = step[rank : rank + 1]
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def in_full(model, optimizer):
    """The optimizer's whole state by name. Collective."""
    names = [name for group in optimizer.param_groups for name in names_of(model, group)]
    packed = optimizer.state_dict()
    state = {names[index]: {k: full(v).clone() for k, v in s.items()} for index, s in packed["state"].items()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in packed["param_groups"]]
    return {"state": state, "options": options}


def names_of(model, group):
    named = {parameter: name for name, parameter in model.named_parameters()}
    return [named[parameter] for parameter in group["params"]]


def assert_equal(actual, expected):
    assert actual["options"] == expected["options"]
    assert actual["state"].keys() == expected["state"].keys()
    assert FROZEN not in actual["state"]
    for name, values in expected["state"].items():
        assert actual["state"][name].keys() == values.keys()
        for key, value in values.items():
            assert actual["state"][name][key].dtype == value.dtype
            assert torch.equal(actual["state"][name][key], value), (name, key)


def save(folder):
    rank, size = world()
    for ep_size, replicas in MESHES[size]:
        model, optimizer = prepared(ep_size, replicas)
        train(model, optimizer)
        # A forward without a backward leaves FSDP2's last weights gathered.
        with torch.no_grad():
            model(input_ids=batches(1, 1, 8)[0])
        target = folder / f"{size}-{ep_size}-{replicas}"
        stage = OptimizerStage(model, optimizer, copy=True)
        save_dcp_model(model, target)
        state, weights = in_full(model, optimizer), weights_in_full(model)
        train(model, optimizer)
        # Training has gone on; what is written is what was staged.
        stage.write(target / OPTIMIZER_FOLDER)
        if ep_size == 0:
            # What Accelerate's FSDP2 writes with SHARDED_STATE_DICT.
            accelerate = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(accelerate, storage_writer=dcp.FileSystemWriter(folder / f"{size}-accelerate" / "optimizer_0"))
            dcp.save(
                {"model": get_model_state_dict(model)},
                storage_writer=dcp.FileSystemWriter(folder / f"{size}-accelerate" / "pytorch_model_fsdp_0"),
            )
            other = {**in_full(model, optimizer), "weights": weights_in_full(model)}
            if rank == 0:
                torch.save(other, folder / f"{size}-accelerate" / "full.pt")
        if rank == 0:
            torch.save({**state, "weights": weights}, target / "full.pt")


def weights_in_full(model):
    return {name: full(value).clone() for name, value in get_model_state_dict(model).items()}


def load(folder):
    _, size = world()
    for ep_size, replicas in MESHES[size]:
        for source in sorted(path for path in folder.iterdir() if path.is_dir()):
            expected = torch.load(source / "full.pt", weights_only=True)
            model, optimizer = prepared(ep_size, replicas)
            before = weights_in_full(model)
            if source.name.endswith("1"):
                # Neither state of its own nor gradients at hand make a difference.
                train(model, optimizer)
                before = weights_in_full(model)
            load_optimizer(model, optimizer, source)
            assert_equal(in_full(model, optimizer), expected)
            assert all(torch.equal(value, before[name]) for name, value in weights_in_full(model).items())
            load_dcp_model(model, source)
            assert all(torch.equal(value, expected["weights"][name]) for name, value in weights_in_full(model).items())
            train(model, optimizer)


def message(function, *arguments):
    try:
        function(*arguments)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no error")


def alone(folder):
    rank, _ = world()
    model, optimizer = prepared(2, 1)
    train(model, optimizer)
    stage = OptimizerStage(model, optimizer, copy=False)
    blocked = folder / "file"
    messages = []
    if rank == 0:
        blocked.write_text("")
    dist.barrier()
    messages.append(message(stage.write, blocked / "optimizer"))
    stage.write(folder / "cut" / "optimizer")
    if rank == 0:
        os.truncate(folder / "cut" / "optimizer" / "__1_0.distcp", 100)
    dist.barrier()
    messages.append(message(load_optimizer, model, optimizer, folder / "cut"))
    for text in messages:
        assert gather(text) == [text] * 2
        print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, folder = sys.argv[1:]
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
    {"save": save, "load": load, "alone": alone}[mode](Path(folder))
    if distributed:
        leave()
