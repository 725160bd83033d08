"""What happens to checkpoints while they are written, and to their files afterwards: kills, damage, full disks."""

from __future__ import annotations

import json
import sys

from processes import TESTS, run_command

RANKS = TESTS / "ranks"
ENVIRONMENT = {"PYTHONPATH": str(TESTS)}


def test_twenty_kills_cost_no_published_checkpoint_and_change_no_bit(tmp_path):
    program = RANKS / "checkpoint_crash.py"
    finished = run_command([sys.executable, program, tmp_path, "0"], env=ENVIRONMENT, timeout=400)
    assert finished.returncode == 0, finished.output
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["wrong"] == [], finished.output
    assert result["steps"] == sorted(result["steps"]) and result["steps"][-1] > 2
    assert result["unfinished"] >= 10, "most kills are to come in the middle of a save"
    last = result["steps"][-1] + 3
    assert {f"checkpoint-{last - 1}", f"checkpoint-{last}", "last"} <= set(result["left"])
    assert not [name for name in result["left"] if name.endswith((".partial", ".replaced"))]
