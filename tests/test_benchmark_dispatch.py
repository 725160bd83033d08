"""The dispatch benchmark runs, its arms compute the same, its counter counts what is known, its targets are held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, run_command

PROGRAM = ROOT / "benchmarks" / "dispatch.py"
SIZES = ["--tokens", "64", "--hidden", "256", "--intermediate", "64", "--experts", "16", "--top-k", "2"]
TOKEN_BYTES = {"bfloat16": 256 * 2, "float32": 256 * 4}


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """What was printed, and every number."""
    report = tmp_path_factory.mktemp("dispatch") / "report.json"
    options = [*SIZES, "--device", "cpu", "--rounds", "1", "--steps-per-round", "1", "--details", "--json", report]
    finished = run_command([sys.executable, PROGRAM, *options], timeout=400)
    assert finished.returncode == 0, finished.output
    return finished.stdout, json.loads(report.read_text())


@pytest.fixture(scope="module")
def counting():
    sys.path.insert(0, str(PROGRAM.parent))
    import counting

    yield counting
    sys.path.remove(str(PROGRAM.parent))


def counts(benchmark, arm):
    return [rank["counts"] for rank in benchmark[1]["counts"][arm]]


def test_every_arm_is_counted_and_what_works_here_is_timed(benchmark):
    printed, report = benchmark
    assert list(report["counts"]) == [
        "transformers", "all_to_all", "deepep_v1", "deepep_v2", "deepep_v2_expanded", "hybridep", "te_ep",
    ]  # fmt: skip
    assert printed.count("emulated: counts only") == 5
    assert {"all_to_all", "transformers"} <= set(report["time"])
    assert set(report["time"]) | set(report["refused"]) == {
        "all_to_all", "deepep", "deepep_expanded", "hybridep", "te_ep", "transformers",
    }  # fmt: skip
    for result in report["time"].values():
        assert len(result["rounds"]) == 1 and result["rounds"][0][0] > 0


@pytest.mark.parametrize(
    ("arm", "most"),
    [
        ("transformers", 1), ("all_to_all", 1), ("deepep_v2", 1), ("deepep_v2_expanded", 0), ("hybridep", 1),
        ("te_ep", 1),
    ],
)  # fmt: skip
def test_the_host_waits_as_often_as_promised(benchmark, arm, most):
    for rank in counts(benchmark, arm):
        assert len(rank["syncs"]) <= most, rank["syncs"]


@pytest.mark.parametrize(
    ("arm", "most"),
    [("all_to_all", 72), ("deepep_v2", 62), ("deepep_v2_expanded", 57), ("hybridep", 53), ("te_ep", 41)],
)
def test_launches_do_not_grow(benchmark, arm, most):
    launched = counts(benchmark, arm)[0]["launched"]
    assert sum(launched.values()) <= most, launched


def test_tokens_travel_once_a_rank_there_and_back_and_so_do_gradients(benchmark):
    (rank_0, rank_1), moved = counts(benchmark, "all_to_all"), benchmark[1]["time"]["all_to_all"]["moved"]
    # Nearly every token has an expert on the other rank: 64 tokens, 4 times, and little beside them.
    for rank in (rank_0, rank_1):
        assert 0.6 < rank["sent_bytes"] / (4 * 64 * TOKEN_BYTES["bfloat16"]) < 1.2
    for rank in moved:
        assert 0.6 < rank["sent_bytes"] / (4 * 64 * TOKEN_BYTES["float32"]) < 1.2
    # Transformers sends each (token, expert) pair.
    assert counts(benchmark, "transformers")[0]["sent_bytes"] > rank_0["sent_bytes"]


def test_every_arm_runs_the_same_six_grouped_gemms(benchmark):
    for arm in benchmark[1]["counts"]:
        assert [rank["launched"]["aten::_grouped_mm"] for rank in counts(benchmark, arm)] == [6, 6]


def test_a_view_an_allocation_and_nothing_to_do_are_no_launches(counting):
    with counting.Counter() as counter:
        rows = torch.zeros(4, 6)
        rows.t()[1:].unsqueeze(0).expand(2, -1, -1).view(torch.int32)
        torch.empty_like(rows)
        rows[:0].mul(2)
        rows.add_(1)
        (rows @ rows.t()).sum()
    launched = counter.result(()).launched
    assert launched == {"aten::zeros": 1, "aten::add_": 1, "aten::mm": 1, "aten::sum": 1}


def test_what_needs_a_value_is_a_host_sync(counting):
    numbers = torch.arange(4)
    with counting.Counter() as counter:
        numbers.tolist()
        numbers.sum().item()
        bool(numbers[0] == 0)
        numbers.nonzero()
        numbers[numbers > 1]
        numbers.repeat_interleave(numbers)
        numbers.cpu()
        torch.tensor([1], device="cpu")
    assert len(counter.result(()).syncs) == 8, counter.result(()).syncs
    with counting.Counter() as counter:
        torch.nonzero_static(numbers, size=3)
        numbers[torch.tensor([1, 2])]
        numbers.repeat_interleave(numbers, output_size=6)
    assert counter.result(()).syncs == []


def test_memory_is_what_lives_at_once_without_what_is_left_out(counting):
    with counting.Counter() as counter:
        one = torch.zeros(1000)
        two = torch.zeros(500)
        del two
        counter.mark()
        three = torch.zeros(250)
    result = counter.result(())
    assert (result.kept_bytes, result.peak_bytes) == (4000, 6000)
    assert counter.result([one]).peak_bytes == 2000
    del three


def test_code_that_stands_for_something_else_is_not_counted(counting, tmp_path):
    module = tmp_path / "engine.py"
    module.write_text("def call(rows):\n    return rows.mul(2), rows.sum().item()\n")
    source = compile(module.read_text(), str(module), "exec")
    names: dict = {}
    exec(source, names)
    rows = torch.ones(3)
    with counting.Counter([Path(tmp_path)]) as counter:
        returned, _ = names["call"](rows)
        counter.engine_call("call", counting.EngineCall(2, 1, 100), returned)
    result = counter.result(())
    assert result.launched == {"call": 2} and result.syncs == ["inside call"]
    assert (result.sent_bytes, result.peak_bytes) == (100, 12)
