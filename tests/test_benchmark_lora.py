"""The LoRA benchmark runs, trains the same adapters in every arm, and sees PEFT's merged weights and none of ours."""

import json
import sys

import pytest
from processes import ROOT, run_command

ARMS = "abcd"
# 2 layers of 64 experts, hidden 64, intermediate 32, in float32: gate and up, then down.
MERGED = 2 * 64 * (2 * 32 * 64 + 64 * 32) * 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    report = tmp_path_factory.mktemp("lora") / "report.json"
    options = ["--workload", "smoke", "--rounds", "1", "--steps-per-round", "1", "--json", report]
    finished = run_command([sys.executable, ROOT / "benchmarks" / "lora.py", *options], timeout=240)
    assert finished.returncode == 0, finished.output
    assert all(f"| ({arm}) " in finished.stdout for arm in ARMS)
    return json.loads(report.read_text())


def test_one_round_of_all_arms_reports_equal_losses_and_every_time(results):
    assert list(results) == list(ARMS)
    for result in results.values():
        steps = result["steps"]
        assert len(steps["rounds"]) == 1 and steps["rounds"][0][0]["milliseconds"] > 0
        assert result["memory"]["growth_mib"] > 0
    for arm in "cd":
        assert results[arm]["steps"]["first_losses"] == pytest.approx(results["a"]["steps"]["first_losses"], abs=5e-5)


def test_peft_keeps_a_merged_copy_of_every_expert_and_expertmesh_none(results):
    assert [results[arm]["merged_bytes"] for arm in ARMS] == [MERGED, MERGED, 0, 0]
    # What ours keeps for the backward altogether is less than that.
    for arm in "cd":
        assert sum(nbytes for _, nbytes in results[arm]["memory"]["saved"]) < MERGED
