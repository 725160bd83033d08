"""Scripts that never heard of expertmesh train with it, because of what they are launched with.

Losses and gradient norms of two or four processes equal those of one plain process, to 1e-5 relative (float32; sums are
taken in another order), before and after a resume.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from processes import ROOT, TESTS, run_command, run_ranks
from ranks.models import batches, build
from transformers import AutoModelForCausalLM

ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
EP2 = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
# The same file under Accelerate's own name for the option, and overridden to 4 ranks.
EP4 = ("--config_file", EP2[1], "--num_processes", "4", "--parallelism_config_ep_size", "4")
DCP = (*EP2, "--parallelism_config_ep_checkpoint_format", "dcp")


def logged(command):
    finished = run_command(command, timeout=150)
    assert finished.returncode == 0, finished.output
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"')]


def assert_same(actual, expected):
    assert len(actual) == len(expected) > 0
    for ours, one_process in zip(actual, expected, strict=True):
        assert ours == {key: pytest.approx(value, rel=1e-5) for key, value in one_process.items()}


@pytest.fixture(scope="module", params=[1, 2], ids=["no-accumulation", "accumulation"])
def bare_loop(request):
    script = (TESTS / "scripts" / "bare_loop.py", str(request.param))
    return script, logged((sys.executable, *script))


@pytest.mark.parametrize("launch", [EP2, EP4, DCP], ids=["ep2", "ep4-by-overrides", "dcp-checkpoint"])
def test_bare_accelerate_loop_and_its_resume(bare_loop, launch, tmp_path):
    script, expected = bare_loop
    # The script trains on to the end, loads the state it saved half-way, and trains its second half again.
    ours = logged((*ACCELERATE, *launch, *script, tmp_path / "state"))
    assert_same(ours, expected + expected[len(expected) // 2 :])
    half = len(expected) // 2
    assert ours[-half:] == ours[half:-half], "a resumed run repeats the uninterrupted one exactly"


def test_trainer_script_and_its_resume(tmp_path):
    script = TESTS / "scripts" / "trainer_script.py"
    expected = logged((sys.executable, script, tmp_path / "one"))
    assert_same(logged((*ACCELERATE, *EP2, script, tmp_path / "ep2")), expected)
    assert_same(logged((*ACCELERATE, *EP2, script, tmp_path / "ep2", "resume")), expected)
    plain, *ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        for folder in ("one/final", "ep2/final", "ep2/checkpoint-4")
    )
    for model, loading in ours:
        assert not any(loading.values()), "every checkpoint is an ordinary Hugging Face model"
        for name, weight in model.named_parameters():
            # Adam divides by the root of tiny squares, which magnifies rounding: 1e-4 of the largest weight.
            assert torch.allclose(
                weight, plain[0].get_parameter(name), rtol=0, atol=1e-4 * weight.abs().max().item()
            ), name


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_trl_script(kind, tmp_path):
    script = TESTS / "scripts" / "trl_script.py"
    expected = logged((sys.executable, script, tmp_path / "one", kind))
    assert_same(logged((*ACCELERATE, *EP2, script, tmp_path / "ep2", kind)), expected)


@pytest.fixture(scope="module")
def plain_losses():
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in batches(3, 8, 12):
        loss = model(input_ids=step, labels=step).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("mode", "tolerance"), [("no", 1e-5), ("trainer", 1e-5), ("bf16", 5e-3)])
def test_keyword_argument_is_enough(mode, tolerance, plain_losses):
    rank_0, _ = run_ranks(TESTS / "ranks" / "python_api.py", 2, mode)
    assert json.loads(rank_0.stdout.splitlines()[-1]) == pytest.approx(plain_losses, rel=tolerance)
