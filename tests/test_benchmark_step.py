"""The step benchmark runs, trains the same model in every arm, and its floor computes real experts."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_command

import expertmesh

PROGRAM = ROOT / "benchmarks" / "step.py"
ARMS = [arm for arm in "abcd" if arm != "c" or hasattr(expertmesh, "ExpertMeshConfig")]


@pytest.fixture
def step_arms(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    spec = importlib.util.spec_from_file_location("step_arms", PROGRAM.parent / "step_arms.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "step_arms", module)
    spec.loader.exec_module(module)
    return module


def test_one_round_of_all_arms_reports_equal_losses_and_every_time(tmp_path):
    report = tmp_path / "report.json"
    options = ["--workload", "smoke", "--rounds", "1", "--steps-per-round", "1", "--json", report, "--arms", *ARMS]
    finished = run_command([sys.executable, PROGRAM, *options], timeout=240)
    assert finished.returncode == 0, finished.output
    results = json.loads(report.read_text())["smoke"]
    assert list(results) == ARMS
    for arm, result in results.items():
        assert len(result["rounds"]) == 1 and result["rounds"][0][0]["milliseconds"] > 0
        assert result["peak_mib"] > 100
        assert f"| ({arm}) " in finished.stdout
    for arm in set(ARMS) - {"d"}:
        assert results[arm]["first_losses"] == pytest.approx(results["a"]["first_losses"], abs=5e-5)


def test_no_worker_survives_a_killed_coordinator(tmp_path):
    command = [sys.executable, PROGRAM, "--workload", "smoke", "--arms", "d"]
    environment = {**os.environ, "STEP_BENCHMARK_TEST": str(tmp_path)}
    coordinator = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(processes_marked(tmp_path)) >= 3)
    finally:
        coordinator.kill()
        coordinator.wait()
    wait_until(lambda: not processes_marked(tmp_path))


def test_stationary_experts_equal_transformers_experts_under_the_same_routing(step_arms):
    torch.manual_seed(0)
    sizes = step_arms.WORKLOADS["smoke"]
    model = step_arms.AutoModelForCausalLM.from_config(sizes.config, experts_implementation="grouped_mm")
    theirs = model.model.layers[0].mlp.experts
    ours = step_arms.StationaryExperts(theirs)
    held, groups = ours.down_proj.shape[0], ours.down_proj.shape[0] // step_arms.TOP_K
    num_tokens = 12 * groups
    hidden = torch.randn(num_tokens, sizes.hidden_size)
    weights = torch.rand(num_tokens, step_arms.TOP_K)
    chunk = torch.arange(num_tokens) // 12
    routing = chunk[:, None] + groups * torch.arange(step_arms.TOP_K)

    results = []
    for experts in (theirs, ours):
        inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        output = experts(inputs[0], routing, inputs[1])
        output.square().sum().backward()
        weight_gradients = [parameter.grad[:held] for parameter in experts.parameters()]
        results.append([output.detach(), *(tensor.grad for tensor in inputs), *weight_gradients])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def processes_marked(marker):
    """Ids of the processes that inherited `marker` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it ended, or belongs to somebody else
            continue
        if f"STEP_BENCHMARK_TEST={marker}\0".encode() in environment:
            found.append(folder.name)
    return found


def wait_until(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.1)
