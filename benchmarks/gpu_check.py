"""Run the checks of `gpu_checks.py` one after another and print how each ended. Exits 1 if any failed.

A check that fails or hangs does not keep the next from running: each is a process group of its own, which is killed
when its time is over.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_checks import CHECKS, Check
from tables import markdown

ROOT = Path(__file__).parents[1]
SKIPPED = 77

Ending = Literal["passed", "failed", "skipped", "timed out"]


@dataclass(frozen=True)
class Result:
    """How a check ended.

    Attributes:
        check: which.
        ending: in a word.
        seconds: how long it took.
        remedy: what to do, or why it was skipped; empty if it passed.
    """

    check: Check
    ending: Ending
    seconds: float
    remedy: str = ""


def run(check: Check, gpus: int, logs: Path) -> Result:
    """Run one check, or say why it cannot be.

    Args:
        check: what to run.
        gpus: how many this machine has.
        logs: the folder for what it prints.
    """
    if check.gpus > gpus:
        return Result(check, "skipped", 0.0, f"it needs {check.gpus} GPUs, and {gpus} can be seen.")
    log = logs / f"{re.sub('[^a-z0-9]+', '-', check.name.lower())}.log"
    start = time.monotonic()
    status = _status(check, log)
    seconds = time.monotonic() - start
    if status is None:
        return Result(check, "timed out", seconds, f"not done after {check.timeout:.0f} s, see {log}. {check.remedy}")
    printed = log.read_text(errors="replace")
    if status == SKIPPED:
        return Result(check, "skipped", seconds, printed.strip().rpartition("\n")[2])
    if status:
        return Result(check, "failed", seconds, f"exit status {status}, see {log}. {check.remedy}")
    reason = _all_tests_skipped(check, printed)
    return Result(check, "passed" if reason is None else "skipped", seconds, reason or "")


def table(results: Sequence[Result]) -> str:
    """A Markdown table."""
    rows = ((each.check.name, each.ending, f"{each.seconds:.0f}", _in_one_cell(each.remedy)) for each in results)
    return markdown(("check", "result", "seconds", "remedy or reason"), rows)


def plan(checks: Sequence[Check]) -> str:
    """What would run, as a Markdown table."""
    rows = (
        (check.name, str(check.gpus), f"{check.timeout:.0f}", f"`{shlex.join(_words(check, 'python'))}`")
        for check in checks
    )
    return markdown(("check", "GPUs", "at most seconds", "command"), rows)


def _words(check: Check, python: str) -> list[str]:
    return [word.format(python=python) for word in check.command]


def _status(check: Check, log: Path) -> int | None:
    """The exit status; None if it was not done in time. Nothing that was started survives."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            _words(check, sys.executable),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(check.timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _all_tests_skipped(check: Check, printed: str) -> str | None:
    """The reason of the first, if the check is pytest and skipped all of its tests."""
    if "pytest" not in check.command or re.search(r"\d+ passed", printed):
        return None
    reason = re.search(r"^SKIPPED \[\d+\] \S+: (.*)$", printed, re.MULTILINE)
    return reason[1] if reason else "no test ran."


def _in_one_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="checks with this in their name")
    parser.add_argument("--list", action="store_true", help="say what would run, and end")
    parser.add_argument("--logs", type=Path, help="the folder for what the checks print; by default a temporary one")
    return parser.parse_args()


def main() -> int:
    chosen = _arguments()
    checks = [check for check in CHECKS if chosen.only in check.name]
    if not checks:
        sys.exit(f"no check has {chosen.only!r} in its name: there are {', '.join(check.name for check in CHECKS)}.")
    gpus = 0 if chosen.list else _visible_gpus()
    if not gpus:
        why = "" if chosen.list else "This machine has no CUDA device, so nothing is checked. "
        print(f"{why}On one with CUDA this would run:\n\n{plan(checks)}")
        return 0
    logs = chosen.logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    results = []
    for number, check in enumerate(checks, 1):
        print(f"[{number}/{len(checks)}] {check.name} ...", end=" ", flush=True)
        results.append(run(check, gpus, logs))
        print(f"{results[-1].ending}, {results[-1].seconds:.0f} s", flush=True)
    print(f"\n{table(results)}\n\nWhat they printed is in {logs}.")
    return int(any(result.ending in ("failed", "timed out") for result in results))


if __name__ == "__main__":
    sys.exit(main())
