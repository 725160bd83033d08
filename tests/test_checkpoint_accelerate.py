"""`Accelerator.save_state` and `load_state`: any mesh resumes what any other saved, and stock Accelerate's checkpoints.

What is resumed is compared with the run that saved and went on: parameters and Adam's state to the bit, the next three
losses to 1e-5 relative (float32; sums are taken in another order). A step is eight sequences everywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from expertmesh_plugins.accelerate.parallelism import ExpertMeshConfig
from processes import ROOT, TESTS, run_command, run_ranks
from ranks.models import build
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from expertmesh.checkpoint.checkpoint import wait_for_checkpoints
from expertmesh.errors import CheckpointError

SCRIPT = TESTS / "scripts" / "checkpoint_loop.py"
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
CONFIG = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
DCP = ("--parallelism_config_ep_checkpoint_format", "dcp")
ASYNC = ("--parallelism_config_ep_async_save", "true")


def reports(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"')]


def launch(processes, ep_size, *arguments, options=()):
    mesh = ("--num_processes", str(processes), "--parallelism_config_ep_size", str(ep_size))
    finished = run_command((*LAUNCH, *CONFIG, *mesh, *options, SCRIPT, *arguments), timeout=400)
    assert finished.returncode == 0, finished.output
    return reports(finished.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def runs(folder):
    """By mesh: the uninterrupted run that saved, and what others resumed from its checkpoint.

    Each launch saves after two steps, goes on, and then resumes from what the launches before it saved; fewer processes
    accumulate more micro-batches.
    """
    saved, resumed = {}, {}

    def note(found, target, sources):
        if target is not None:
            saved[target] = found.pop(0)
        for source, report in zip(sources, found, strict=True):
            resumed.setdefault(source, []).append(report)

    def run(processes, ep_size, accumulation, target, *sources, options=()):
        paths = [folder / source for source in sources]
        goal = "-" if target is None else folder / target
        note(launch(processes, ep_size, str(accumulation), goal, *paths, options=options), target, sources)

    run(4, 4, 1, "ep4")
    run(4, 2, 2, "ep2-efsdp2", "ep4", options=DCP)
    stock = run_ranks(
        SCRIPT, 2, "1", folder / "stock", folder / "ep2-efsdp2", timeout=400,
        env={"STOCK_FSDP2": "1", "EXPERTMESH_AUTOLOAD": "0"},
    )  # fmt: skip
    note(reports(stock[0].stdout), "stock", ["ep2-efsdp2"])
    run(2, 1, 1, "ep1", "ep4", "ep2-efsdp2", "stock", options=ASYNC)
    # Stock Accelerate notes how many micro-batches it has seen, and counts on from there, so that 4 would not do here.
    run(1, 1, 4, "one", "ep4", "ep2-efsdp2", "ep1")
    run(4, 4, 2, None, "one", "ep1", "ep2-efsdp2", "stock")
    return saved, resumed


@pytest.mark.parametrize("mesh", ["ep4", "ep2-efsdp2", "ep1", "one", "stock"])
def test_every_mesh_resumes_it_to_the_bit_and_goes_on_with_its_losses(runs, mesh):
    saved, resumed = runs
    assert resumed[mesh]
    for report in resumed[mesh]:
        assert report["begin"] == saved[mesh]["begin"]
        assert report["losses"] == pytest.approx(saved[mesh]["losses"], rel=1e-5)


@pytest.mark.parametrize("mesh", ["ep4", "ep1", "one"])
def test_it_is_the_model_that_one_process_would_save(runs, folder, mesh, tmp_path):
    model, loading = AutoModelForCausalLM.from_pretrained(folder / mesh, output_loading_info=True)
    assert not any(loading.values())
    model.save_pretrained(tmp_path)
    ours, one_process = stored(folder / mesh), stored(tmp_path)
    assert ours.keys() == one_process.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == one_process[name].dtype
        assert torch.equal(tensor, one_process[name])


def test_dcp_is_accelerates_own_layout(runs, folder):
    found = {path.name for path in (folder / "ep2-efsdp2").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "expertmesh.json"} <= found
    assert not list((folder / "ep2-efsdp2").glob("*.safetensors"))


def stored(model_folder):
    tensors = {}
    for path in Path(model_folder).glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


# One process of its own is enough for the rest.


class Counter:
    """Something of the user's that is registered for checkpointing."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        if isinstance(self.state, Exception):
            raise self.state
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]


@pytest.fixture
def accelerator(tmp_path):
    """An accelerator in this process, with a prepared model and optimizer."""

    def make(config=None, **project):
        AcceleratorState._reset_state(True)
        naming = ProjectConfiguration(project_dir=str(tmp_path), **project)
        made = Accelerator(parallelism_config=config or ExpertMeshConfig(), cpu=True, project_config=naming)
        model = build()
        made.prepare(model, torch.optim.AdamW(model.parameters()))
        return made

    yield make
    AcceleratorState._reset_state(True)


def test_the_oldest_automatic_checkpoint_goes_once_the_new_one_is_complete(accelerator, tmp_path):
    ours = accelerator(automatic_checkpoint_naming=True, total_limit=2)
    counter = Counter(0)
    ours.register_for_checkpointing(counter)
    for _ in range(2):
        ours.save_state()
    counter.state = OSError(28, "No space left on device", "somewhere")
    with pytest.raises(CheckpointError, match="No space left on device"):
        ours.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]
    counter.state = 7
    ours.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    counter.state = 0
    (tmp_path / "checkpoints" / "checkpoint_9.partial").mkdir()
    ours.load_state()
    assert counter.state == 7, "the newest complete one is read"


def test_an_automatic_name_that_is_taken_is_refused(accelerator, tmp_path):
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"set `accelerator\.project_configuration\.iteration`"):
        accelerator(automatic_checkpoint_naming=True).save_state()


def test_an_object_that_needs_unsafe_unpickling_is_refused(accelerator, tmp_path):
    ours = accelerator()
    ours.register_for_checkpointing(Counter(Counter(1)))
    ours.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl, the state of Counter, .* let its state_dict"):
        ours.load_state(tmp_path / "state")


def test_other_registered_objects_are_refused(accelerator, tmp_path):
    ours = accelerator()
    ours.save_state(tmp_path / "state")
    ours.register_for_checkpointing(Counter(1))
    with pytest.raises(CheckpointError, match="holds 0 registered objects, but 1 are registered"):
        ours.load_state(tmp_path / "state")


def test_hooks_find_the_folder_that_is_being_written_and_the_one_that_is_read(accelerator, tmp_path):
    ours = accelerator()
    ours.register_save_state_pre_hook(lambda models, weights, path: Path(path, "note").write_text(str(weights)))
    seen = []
    ours.register_load_state_pre_hook(lambda models, path: seen.append((models, path)))
    ours.save_state(tmp_path / "state")
    ours.load_state(tmp_path / "state")
    assert (tmp_path / "state" / "note").read_text() == "[]"
    assert seen == [([], str(tmp_path / "state"))]


def test_a_damaged_file_beside_the_weights_is_named(accelerator, tmp_path):
    ours = accelerator()
    ours.register_for_checkpointing(Counter(1))
    ours.save_state(tmp_path / "state")
    file = tmp_path / "state" / "custom_checkpoint_0.pkl"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0.pkl: the content is not what was written"):
        ours.load_state(tmp_path / "state")


@pytest.mark.parametrize("surface", ["the next save", "the end"])
def test_a_background_failure_is_raised_later_and_harms_nothing(accelerator, tmp_path, surface):
    ours = accelerator(ExpertMeshConfig(ep_async_save=True))
    ours.save_state(tmp_path / "state")
    wait_for_checkpoints()
    # A file is where the background has to make a folder.
    handle = ours.register_save_state_pre_hook(lambda models, weights, path: Path(path, "optimizer").write_text(""))
    ours.save_state(tmp_path / "state")
    handle.remove()
    with pytest.raises(CheckpointError, match="A file is where a folder has to be"):
        ours.save_state(tmp_path / "state") if surface == "the next save" else ours.end_training()
    ours.load_state(tmp_path / "state")


def test_other_accelerators_are_not_touched(accelerator, tmp_path):
    accelerator()
    AcceleratorState._reset_state(True)
    stock = Accelerator(cpu=True)
    stock.prepare(torch.nn.Linear(2, 2))
    stock.save_state(tmp_path / "state")
    stock.load_state(tmp_path / "state")
    assert names(tmp_path / "state") == ["model.safetensors", "random_states_0.pkl"]


def names(path):
    return sorted(entry.name for entry in path.iterdir())
