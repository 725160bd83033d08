"""What happens to checkpoints while they are written, and to their files afterwards: kills, damage, full disks."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
from processes import TESTS, run_command

RANKS = TESTS / "ranks"
ENVIRONMENT = {"PYTHONPATH": str(TESTS)}


def test_twenty_kills_cost_no_published_checkpoint_and_change_no_bit(tmp_path):
    program = RANKS / "checkpoint_crash.py"
    finished = run_command([sys.executable, program, tmp_path, "1"], env=ENVIRONMENT, timeout=400)
    assert finished.returncode == 0, finished.output
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["wrong"] == [], finished.output
    assert result["steps"] == sorted(result["steps"]) and result["steps"][-1] > 2
    assert result["unfinished"] >= 10, "most kills are to come in the middle of a save"
    last = result["steps"][-1] + 3
    assert {f"checkpoint-{last - 1}", f"checkpoint-{last}", "last"} <= set(result["left"])
    assert not [name for name in result["left"] if name.endswith((".partial", ".replaced"))]


def faults(folder, what):
    finished = run_command([sys.executable, RANKS / "checkpoint_faults.py", folder, what], env=ENVIRONMENT, timeout=200)
    assert finished.returncode == 0, finished.output


def test_a_damaged_file_is_found_and_named(tmp_path):
    faults(tmp_path, "damage")


def test_a_save_that_is_refused_harms_neither_the_training_nor_what_is_there(tmp_path):
    faults(tmp_path, "refused")


def test_a_full_disk_harms_neither_the_training_nor_what_is_there(tmp_path):
    """On two small file systems that only this test's processes see."""
    mounts = []
    for name, size in (("weights", "60k"), ("optimizer", "220k")):
        (tmp_path / name).mkdir()
        mounts.append(f"mount -t tmpfs -o size={size} tmpfs {tmp_path / name}")
    alone = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if shutil.which("unshare") is None or run_command([*alone, "sh", "-c", " && ".join(mounts)]).returncode:
        pytest.skip("this machine does not let a test mount a file system of its own")
    program = f"{sys.executable} {RANKS / 'checkpoint_faults.py'} {tmp_path} full"
    finished = run_command([*alone, "sh", "-c", " && ".join([*mounts, program])], env=ENVIRONMENT, timeout=200)
    assert finished.returncode == 0, finished.output
