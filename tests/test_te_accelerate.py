"""Scripts that never heard of expertmesh get Transformer Engine's layers from what they are launched with.

The emulation is installed as a package, with metadata, as Accelerate and PEFT look for it. In float32 everything equals
one plain process to 1e-5 relative; with 8 bits losses are within 2%.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import TERecipeKwargs
from emulation import te_device
from emulation.install import installed
from processes import ROOT, TESTS, run_command
from ranks.models import batches, build
from transformers import AutoModelForCausalLM

from expertmesh import ExpertMeshConfig
from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.layers import replace_layers

LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
EP2 = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
TE = ("--parallelism_config_ep_layers", "te")
PACKAGE = """
import importlib
import sys

sys.path.append({tests!r})
from emulation import te_device
from emulation.install import EMULATIONS

te_device.ALLOW_CPU = True
for real, module in EMULATIONS["te"].items():
    sys.modules[real] = importlib.import_module("emulation." + module)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One in which `transformer_engine` is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "transformer_engine").mkdir()
    (site / "transformer_engine" / "__init__.py").write_text(PACKAGE.format(tests=str(TESTS)))
    metadata = site / "transformer_engine-2.20.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    return {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def logged(command, env=None):
    finished = run_command(command, timeout=150, env=env)
    assert finished.returncode == 0, finished.output
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"')]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return logged((sys.executable, TESTS / "scripts" / "trainer_script.py", tmp_path_factory.mktemp("one")))


def test_a_trainer_script_is_the_same_and_so_are_its_checkpoints(one_process, environment, tmp_path):
    script = TESTS / "scripts" / "trainer_script.py"
    ours = logged((*LAUNCH, *EP2, *TE, "--parallelism_config_ep_compute", "te", script, tmp_path), environment)
    for found, expected in zip(ours, one_process, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(loading.values())
    # What Transformer Engine wrote goes on without it.
    assert logged((*LAUNCH, *EP2, script, tmp_path, "resume"))[-1] == pytest.approx(one_process[-1], rel=1e-5)


def test_a_trainer_script_in_8_bits(one_process, environment, tmp_path):
    script = TESTS / "scripts" / "trainer_script.py"
    ours = logged((*LAUNCH, *EP2, *TE, "--mixed_precision", "fp8", script, tmp_path), environment)
    for found, expected in zip(ours, one_process, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
        assert found["loss"] != pytest.approx(expected["loss"], rel=1e-5)


def test_where_it_is_not_installed_that_is_said():
    with pytest.raises(ConfigError, match="ep_layers te cannot be used here: transformer_engine cannot be imported"):
        replace_layers(build(), ExpertParallelConfig(ep_layers="te"), torch.device("cpu"))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(te_device, "ALLOW_CPU", True)
    # What Accelerate asks is whether something of the kind is installed.
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: True)
    # What tests before have configured would be kept, and so would this.
    _forget_accelerate()
    with installed("te"):
        yield
    _forget_accelerate()


def _forget_accelerate():
    for state in (AcceleratorState, PartialState):
        state._shared_state.clear()


def accelerator(**options):
    choices = {name: options.pop(name) for name in list(options) if name.startswith("ep_")}
    return Accelerator(cpu=True, parallelism_config=ExpertMeshConfig(**choices), **options)


@pytest.mark.parametrize("mixed_precision", ("no", "fp8"))
def test_one_process_has_the_layers_too(engine, mixed_precision):
    model = build(hidden_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.named_parameters())
    prepared, optimizer = accelerator(ep_layers="te", mixed_precision=mixed_precision).prepare(model, optimizer)
    linear = model.model.layers[0].self_attn.q_proj
    assert type(linear).__module__ == "expertmesh_plugins.transformer_engine.linear"
    assert type(model.lm_head) is torch.nn.Linear
    assert (linear._recipe is not None) is (mixed_precision == "fp8")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    tokens = batches(1, 2, 12)[0]
    weight = linear.weight.detach().clone()
    prepared(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not torch.equal(linear.weight, weight)


def test_8_bits_without_layers_that_have_them_are_refused(engine):
    with pytest.raises(ConfigError, match="multiply in 8 bits, and ep_layers is auto: set ep_layers to te"):
        accelerator(mixed_precision="fp8")


def test_a_recipe_of_accelerates_is_refused(engine, monkeypatch):
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    with pytest.raises(ConfigError, match="has no use for Accelerate's backends and recipes"):
        accelerator(mixed_precision="fp8", ep_layers="te", kwargs_handlers=[TERecipeKwargs()])


def test_a_backend_of_accelerates_is_refused(engine, monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    with pytest.raises(ConfigError, match="remove `fp8_config`"):
        accelerator(mixed_precision="fp8", ep_layers="te")
