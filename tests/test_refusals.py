"""What only the model can tell is refused by the workers: one line for the job, exit status 78, nothing written."""

from __future__ import annotations

import sys

import pytest
from processes import ROOT, TESTS, run_command

from expertmesh.errors import CONFIG_EXIT_CODE


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dense", "LlamaForCausalLM has no routed experts"),
        ("indivisible", "has 7 experts, which ep_size 2 does not divide: set ep_size to one of 1, 7."),
    ],
)
def test_a_model_that_cannot_be_spread_ends_the_job_with_one_line(kind, message, tmp_path):
    launch = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    config = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
    finished = run_command((*launch, *config, TESTS / "scripts" / "refused.py", kind), cwd=tmp_path, timeout=120)
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    ours = [line for line in finished.stderr.splitlines() if line.startswith("expertmesh: ")]
    assert len(ours) == 1 and message in ours[0], finished.output
    assert "Traceback" not in finished.output
    assert "not refused" not in finished.stdout
    assert not list(tmp_path.iterdir())
