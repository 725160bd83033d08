"""PEFT's LoRA under expert parallelism: one process's gradients, PEFT's own files, and a resume on any mesh.

Tolerances are relative to a tensor's largest entry, 1e-5 in float32: sums are taken in another order.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from processes import ROOT, TESTS, run_command, run_ranks
from ranks.models import build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
CONFIG = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
MESHES = {
    "one process": ("--num_processes", "1", "--parallelism_config_ep_size", "1"),
    "ep2": (),
    "efsdp2": ("--parallelism_config_ep_size", "1"),
    "ep4": ("--num_processes", "4", "--parallelism_config_ep_size", "4"),
    "ep2 x efsdp2": ("--num_processes", "4", "--parallelism_config_ep_size", "2"),
}
BOTH = "experts.gate_up_proj,experts.down_proj"
TARGETS = {"nemotron_h": "experts.up_proj,experts.down_proj"}
EXACT = {"loss": 1e-5, "gradient": 1e-5, "norm": 1e-5, "parameter": 1e-5}


@cache
def parity(num_processes: int) -> dict[str, dict[str, float]]:
    rank_0, *_ = run_ranks(TESTS / "ranks" / "parity.py", num_processes, "lora", timeout=500)
    return json.loads(rank_0.stdout.splitlines()[-1])


MESH_CASES = {
    2: ("ep1-efsdp1-replicas2", "ep1-efsdp2-replicas1", "ep2-efsdp1-replicas1"),
    4: ("ep1-efsdp2-replicas2", "ep2-efsdp1-replicas2", "ep2-efsdp2-replicas1", "ep4-efsdp1-replicas1", "empty-rank"),
}
KINDS = (
    "attention", "up", "down", "rank-1", "rank-stabilised", "patterns", "head-saved", "dora", "grouped-mm",
    "accumulation", "checkpointing", "one-expert", "family-gpt_oss", "family-deepseek_v3", "family-mixtral",
    "family-granitemoe", "family-nemotron_h",
)  # fmt: skip


@pytest.mark.parametrize(("num_processes", "case"), [(n, case) for n, cases in MESH_CASES.items() for case in cases])
def test_adapters_gradients_on_every_mesh_equal_pefts_in_one_process(num_processes, case):
    found = parity(num_processes)[case]
    assert all(found[name] <= limit for name, limit in EXACT.items()), found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_equals_pefts_in_one_process(kind):
    found = parity(2)[kind]
    assert all(found[name] <= limit for name, limit in EXACT.items()), found


def test_no_case_is_left_out():
    assert {case for cases in (parity(2), parity(4)) for case in cases} == {*MESH_CASES[2], *MESH_CASES[4], *KINDS}


def train(base: Path, output: Path, *launch: str | Path, family: str = "qwen3_moe", resume: Path | None = None):
    script = (TESTS / "scripts" / "lora_trainer.py", base, output, TARGETS.get(family, BOTH))
    finished = run_command((*launch, *script, *([resume] if resume else [])), timeout=200)
    assert finished.returncode == 0, finished.output
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"step')]


def assert_same_steps(ours, expected):
    assert len(ours) == len(expected) > 0
    for found, one_process in zip(ours, expected, strict=True):
        assert found == {key: pytest.approx(value, rel=1e-5) for key, value in one_process.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One base model; what PEFT and Trainer alone do with it in one process; and the same script under every mesh."""
    folder = tmp_path_factory.mktemp("lora")
    build().eval().save_pretrained(folder / "base")
    steps = {"plain": train(folder / "base", folder / "plain", sys.executable)}
    for name, mesh in MESHES.items():
        steps[name] = train(folder / "base", folder / name, *ACCELERATE, *CONFIG, *mesh)
    return folder, steps


@pytest.mark.parametrize("mesh", MESHES)
def test_an_untouched_trainer_script_trains_adapters_like_one_process(runs, mesh):
    folder, steps = runs
    assert_same_steps(steps[mesh], steps["plain"])
    ours, expected = (load_file(folder / name / "final" / "adapter_model.safetensors") for name in (mesh, "plain"))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape
        # Adam divides by the root of tiny squares, which magnifies rounding: 1e-3 of the largest weight.
        assert (ours[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), name


def stock_logits(base: Path, adapter: Path):
    tokens = torch.randint(3, 96, (64, 12), generator=torch.Generator().manual_seed(1))[:4]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        without = model(input_ids=tokens).logits
        with warnings.catch_warnings():
            # PEFT warns of adapter weights that it misses or has no place for.
            warnings.simplefilter("error", UserWarning)
            adapted = PeftModel.from_pretrained(model, adapter)
        merged = adapted.merge_and_unload()
        return {"base": without, "adapted": merged(input_ids=tokens).logits}


@pytest.mark.parametrize("mesh", MESHES)
def test_stock_peft_merges_the_saved_adapter_into_the_model_that_was_trained(runs, mesh):
    folder, _ = runs
    trained = torch.load(folder / mesh / "logits.pt", weights_only=True)
    stock = stock_logits(folder / "base", folder / mesh / "final")
    for name, logits in stock.items():
        assert (trained[name] - logits).abs().max() <= 1e-5 * logits.abs().max(), name
    assert (stock["adapted"] - stock["base"]).abs().max() > 0.05 * stock["base"].abs().max(), "it learned something"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("ep4", "ep2"), ("ep2", "ep2 x efsdp2"), ("ep2 x efsdp2", "one process"), ("one process", "ep4"),
        ("efsdp2", "ep2"),
    ],
)  # fmt: skip
def test_adapters_and_their_optimizer_resume_on_another_mesh(runs, saved, resumed, tmp_path):
    folder, steps = runs
    checkpoint = folder / saved / "checkpoint-2"
    ours = train(folder / "base", tmp_path, *ACCELERATE, *CONFIG, *MESHES[resumed], resume=checkpoint)
    assert_same_steps(ours, steps["plain"])
    assert ours[:2] == steps[saved][:2], "the first steps are the saved ones"


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "deepseek_v3", "granitemoe"])
def test_stock_peft_reads_the_adapters_of_every_layout(family, tmp_path):
    build(family).eval().save_pretrained(tmp_path / "base")
    train(tmp_path / "base", tmp_path / "out", *ACCELERATE, *CONFIG, family=family)
    trained = torch.load(tmp_path / "out" / "logits.pt", weights_only=True)
    for name, logits in stock_logits(tmp_path / "base", tmp_path / "out" / "final").items():
        assert (trained[name] - logits).abs().max() <= 1e-5 * logits.abs().max(), name
