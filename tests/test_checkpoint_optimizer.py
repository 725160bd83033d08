"""Adam's state and DCP weights: bit-equal from every mesh to every other, and nothing in a file is ever run."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import TESTS, run_ranks
from torch import nn

from expertmesh.checkpoint.dcp import load_dcp_model, save_dcp_model
from expertmesh.checkpoint.optimizer import OPTIMIZER_FOLDER, OptimizerStage, load_optimizer
from expertmesh.errors import CheckpointError

PROGRAM = TESTS / "ranks" / "optimizer_state.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What every mesh of 1, 2 and 4 processes writes, and what stock FSDP2 does."""
    folder = tmp_path_factory.mktemp("optimizer")
    for size in (1, 2, 4):
        run_ranks(PROGRAM, size, "save", folder, timeout=300)
    return folder


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_mesh_resumes_what_every_other_wrote(saved, size):
    assert len(list(saved.iterdir())) == 10
    run_ranks(PROGRAM, size, "load", saved, timeout=500)


def test_trouble_of_one_rank_is_everybodys(tmp_path):
    blocked, cut = run_ranks(PROGRAM, 2, "alone", tmp_path)[0].stdout.splitlines()
    assert "move it away" in blocked
    assert "cannot load the optimizer state" in cut


def trained(make=torch.optim.AdamW, unused=False, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizer = make(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        hidden = model["a"](torch.randn(3, 4))
        (hidden if unused else model["b"](hidden)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(make=torch.optim.AdamW, **options):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    return model, make(model.parameters(), lr=5.0, **options)


def write(folder, model, optimizer):
    OptimizerStage(model, optimizer, copy=False).write(folder / OPTIMIZER_FOLDER)


def assert_same_state(actual, expected):
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(actual["state"][index][key], value)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_other_optimizers(make, options, tmp_path):
    model, optimizer = trained(make, **options)
    write(tmp_path, model, optimizer)
    other = fresh(make, **options)
    load_optimizer(*other, tmp_path)
    assert_same_state(other[1], optimizer)


def test_saving_before_the_first_step_leaves_no_trace(tmp_path):
    model, optimizer = fresh()
    write(tmp_path, model, optimizer)
    assert not optimizer.state
    model, optimizer = trained()
    load_optimizer(model, optimizer, tmp_path)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 5.0


def test_loading_leaves_weights_and_gradients_alone(tmp_path):
    write(tmp_path, *trained())
    model, optimizer = fresh()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    load_optimizer(model, optimizer, tmp_path)
    assert all(map(torch.equal, model.parameters(), before))
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards(tmp_path):
    model, optimizer = trained(unused=True)
    write(tmp_path, model, optimizer)
    other = fresh()
    load_optimizer(*other, tmp_path)
    assert len(other[1].state_dict()["state"]) == 2
    assert_same_state(other[1], optimizer)


def test_how_a_step_is_computed_is_not_state(tmp_path):
    write(tmp_path, *trained(foreach=True))
    model, optimizer = fresh(foreach=False)
    load_optimizer(model, optimizer, tmp_path)
    assert optimizer.param_groups[0]["foreach"] is False


def test_what_does_not_fit_is_named(tmp_path):
    model, optimizer = trained()
    write(tmp_path, model, optimizer)

    def refused(expected, parameters, make=torch.optim.AdamW, **options):
        with pytest.raises(CheckpointError, match=expected):
            load_optimizer(model, make(parameters, lr=1.0, **options), tmp_path)

    parameters = list(model.parameters())
    refused(
        r"exp_avg, exp_avg_sq, step instead of momentum_buffer for a\.bias", parameters, torch.optim.SGD, momentum=0.9
    )
    refused(r"does not train a\.weight", parameters[1:])
    refused(r"parameter group 0 \(a\.bias, a\.weight\)", [{"params": parameters[:2]}, {"params": parameters[2:]}])
    refused("are not the model's", [nn.Parameter(torch.zeros(1))])
    model["c"] = nn.Linear(2, 2)
    refused(r"nothing for c\.bias, c\.weight", model.parameters())
    save_dcp_model(model, tmp_path)
    del model["c"]
    model["b"] = nn.Linear(4, 2)
    with pytest.raises(
        CheckpointError, match=r"not in the model: c\.bias, c\.weight; of another shape: b\.bias, b\.weight"
    ):
        load_dcp_model(model, tmp_path)


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


class OsAttack(Attack):
    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("attack", [Attack, OsAttack])
@pytest.mark.parametrize("place", ["metadata", "inside metadata", "entry"])
def test_nothing_in_a_checkpoint_is_run(attack, place, tmp_path):
    mark = tmp_path / "mark"
    model, optimizer = trained()
    folder = tmp_path / OPTIMIZER_FOLDER
    write(tmp_path, model, optimizer)
    if place == "entry":
        state = OptimizerStage(model, optimizer, copy=False)._state
        state["optimizer"]["param_groups"][0]["eps"] = attack(mark)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    else:
        metadata = attack(mark)
        if place == "inside metadata":
            metadata = pickle.loads((folder / ".metadata").read_bytes())
            metadata.planner_data["x"] = attack(mark)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"refers to|not plain data"):
        load_optimizer(model, optimizer, tmp_path)
    assert not mark.exists()


def test_metadata_may_not_point_outside_its_folder(tmp_path):
    model, optimizer = trained()
    write(tmp_path, model, optimizer)
    path = tmp_path / OPTIMIZER_FOLDER / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../other/__0_0.distcp"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load_optimizer(model, optimizer, tmp_path)
