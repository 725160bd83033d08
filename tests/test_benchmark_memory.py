"""What the memory benchmark foresees without memory is what real processes take."""

import json
import sys

import pytest
from processes import ROOT, run_command

ARMS = ("fsdp2", "transformers_ep", "expertmesh", "expertmesh_selective")


def benchmark(*options: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, ROOT / "benchmarks" / "memory.py", "--json", *options]
    finished = run_command(command, timeout=280)
    assert finished.returncode == 0, finished.output
    return json.loads(finished.stdout)


def test_the_peak_is_the_sum_of_its_parts_and_ours_is_the_lowest():
    results = benchmark("--layers", "2")
    assert tuple(results) == ARMS
    for found in results.values():
        assert found["peak_gib"] == pytest.approx(sum(found.values()) - found["peak_gib"])
        assert found["optimizer"] == pytest.approx(2 * found["parameters"], rel=1e-3)
    peaks = [results[arm]["peak_gib"] for arm in ARMS]
    assert peaks == sorted(peaks, reverse=True)


def test_what_is_foreseen_is_what_real_processes_take():
    found = benchmark("--check", "--arms", "expertmesh")["expertmesh"]
    assert abs(found["error"]) < 0.05, found
