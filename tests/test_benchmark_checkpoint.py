"""The checkpoint benchmark runs, checks what it saved and loaded, and counts what the operating system saw."""

import json
import sys

import pytest
from processes import ROOT, run_command

PROGRAM = ROOT / "benchmarks" / "checkpoint.py"
ARMS = ["a", "d", "e"]
RANKS = 2


@pytest.fixture
def checkpoint_report(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    import checkpoint_report

    return checkpoint_report


def test_one_round_reports_time_bytes_and_memory_of_every_arm(tmp_path):
    report = tmp_path / "report.json"
    options = ["--size", "smoke", "--ranks", str(RANKS), "--rounds", "1", "--folder", tmp_path, "--json", report]
    finished = run_command([sys.executable, PROGRAM, *options, "--arms", *ARMS], timeout=240)
    assert finished.returncode == 0, finished.output
    measured = json.loads(report.read_text())
    assert list(measured["arms"]) == ARMS
    for arm, result in measured["arms"].items():
        assert f"| ({arm}) " in finished.stdout
        (turn,) = result["turns"]
        for operation in ("save", "load"):
            assert len(turn[operation]) == RANKS
            assert all(rank["seconds"] > 0 for rank in turn[operation])
        assert sum(rank["written"] for rank in turn["save"]) >= measured["model_bytes"]
        assert result["folder_bytes"] >= measured["model_bytes"]
        assert result["names"] == ("fused" if arm == "d" else "per expert")
    assert list(tmp_path.iterdir()) == [report]


def test_the_report_puts_expertmesh_beside_the_fastest_other_arm_and_its_targets(checkpoint_report):
    def result(arm, save, sync):
        usages = [
            checkpoint_report.Usage(seconds, dirtied=500, written=600, read=0, mapped=0, growth=int(growth))
            for seconds, growth in ((save, 10e6), (save / 2, 20e6))
        ]
        turn = checkpoint_report.Turn(usages, sync, usages)
        return checkpoint_report.ArmResult(arm, "nothing", "per expert", 1000, warm_up=turn, turns=[turn, turn])

    arms = {"a": result("slow", 9.0, 0.0), "b": result("fast", 4.0, 2.0), "e": result("ours", 1.0, 0.5)}
    text = checkpoint_report.report(1000, arms)
    assert "bytes written: 1.000 (0.500) x the model's" in text
    assert "save: 4.00 x faster than (b)" in text
    assert "save + sync: 4.00 x faster than (b)" in text
    assert "while saving: 20 MB" in text
    assert "| (a) slow | 9.00 (9.00 to 9.00) | 9.00 (9.00 to 9.00) | 9.00 (9.00 to 9.00) | 9.00 | 6.00 | 9.00 |" in text
