"""The GPU checks: what a machine without CUDA says, and the table of real processes that end in every way."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, run_command

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def programs():
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_check
    import gpu_checks

    yield gpu_check, gpu_checks
    sys.path.remove(str(BENCHMARKS))


def check(programs, code, **options):
    command = ("{python}", "-c", code)
    return programs[1].Check("a check", command, "mend it.", **{"timeout": 30, "gpus": 0, **options})


def test_a_machine_without_cuda_says_what_would_run(programs):
    finished = run_command([BENCHMARKS / "gpu_check.sh"], env={"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable})
    assert finished.returncode == 0, finished.output
    assert "no CUDA device" in finished.stdout
    for each in programs[1].CHECKS:
        assert f"| {each.name} | {each.gpus} | " in finished.stdout


def test_only_some_can_be_asked_for(programs):
    finished = run_command([BENCHMARKS / "gpu_check.sh", "--list", "--only", "parity"], env={"PYTHON": sys.executable})
    assert finished.returncode == 0, finished.output
    rows = [line for line in finished.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 15 and all(row.startswith("| parity ") for row in rows)


def test_every_check_has_a_name_of_its_own_and_names_files_that_are_there(programs):
    checks = programs[1].CHECKS
    assert len({each.name for each in checks}) == len(checks)
    for each in checks:
        assert each.timeout > 0 and each.remedy.endswith(".")
        for word in each.command:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


@pytest.mark.parametrize(
    ("code", "ending", "said"),
    [
        ("print('fine')", "passed", ""),
        ("raise SystemExit(3)", "failed", "exit status 3"),
        ("import os; os.abort()", "failed", "exit status -6"),
        ("print('no engine here.'); raise SystemExit(77)", "skipped", "no engine here."),
    ],
)
def test_a_check_ends_in_every_way(programs, tmp_path, code, ending, said):
    result = programs[0].run(check(programs, code), 0, tmp_path)
    assert result.ending == ending and said in result.remedy
    assert ("mend it." in result.remedy) == (ending == "failed")


def test_a_check_that_hangs_is_ended_with_its_children(programs, tmp_path):
    note = tmp_path / "pid"
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{child}; open({str(note)!r}, 'w').write(str(p.pid)); p.wait()"
    start = time.monotonic()
    result = programs[0].run(check(programs, code, timeout=3), 0, tmp_path)
    assert result.ending == "timed out" and "not done after 3 s" in result.remedy
    assert time.monotonic() - start < 20
    deadline = time.monotonic() + 20
    while _is_running(Path("/proc", note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_too_few_gpus_are_said_and_nothing_is_run(programs, tmp_path):
    result = programs[0].run(check(programs, "raise SystemExit(1)", gpus=4), 2, tmp_path)
    assert result.ending == "skipped" and result.remedy == "it needs 4 GPUs, and 2 can be seen."


def test_pytest_with_nothing_but_skips_is_skipped(programs, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('the engine is not installed')\n")
    command = ("{python}", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(file))
    result = programs[0].run(programs[1].Check("tests", command, "mend it.", gpus=0), 0, tmp_path)
    assert result.ending == "skipped" and result.remedy == "the engine is not installed"
    file.write_text("def test_it():\n    pass\n")
    assert programs[0].run(programs[1].Check("tests", command, "mend it.", gpus=0), 0, tmp_path).ending == "passed"


def test_the_table_has_a_row_for_each_check_and_no_text_breaks_it(programs, tmp_path):
    gpu_check, _ = programs
    results = [gpu_check.run(check(programs, code), 0, tmp_path) for code in ("print('x')", "raise SystemExit(1)")]
    results.append(gpu_check.Result(results[0].check, "skipped", 0.0, "a | b\nc"))
    head, _, *rows = gpu_check.table(results).splitlines()
    assert head == "| check | result | seconds | remedy or reason |"
    assert len(rows) == 3 and rows[2] == "| a check | skipped | 0 | a \\| b c |"


def test_parity_passes_on_real_ranks_and_what_is_not_installed_is_skipped(programs, tmp_path):
    gpu_check, gpu_checks = programs
    for dispatcher, ending in (("all_to_all", "passed"), ("te_ep", "skipped")):
        words = ("benchmarks/layer_parity.py", "--dispatcher", dispatcher, "--device", "cpu")
        one = gpu_checks.Check(f"parity {dispatcher}", ("{python}", *words), "mend it.", timeout=180, gpus=0)
        result = gpu_check.run(one, 0, tmp_path)
        assert result.ending == ending, (result, [log.read_text() for log in tmp_path.glob("*.log")])
    assert "transformer_engine cannot be imported" in result.remedy


def _is_running(folder: Path) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return "State:\tZ" not in (folder / "status").read_text()
    except OSError:
        return False
