"""What the autoload hook adds to `import torch`, in a plain script, in `accelerate launch`, and in one of its workers.

PyTorch looks up the entry points of the group `torch.backends`, imports ours and calls it. Each of these steps is timed
in fresh interpreters, right after an `import torch` that skipped them. The kinds of process take turns, so that a busy
moment of the machine hits all of them. The lookup is PyTorch's own cost: it is there without us. Python may keep
compiled files here, as it may in any installation; compiling ours anew each time would cost another millisecond.

    python benchmarks/import_hook.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

# A kind of process, as `activate` tells them apart: its sys.argv, and what its environment has more.
KINDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain script": (["train.py"], {}),
    "launcher": (["accelerate", "launch", "train.py"], {}),
    "worker": (["train.py"], {"PARALLELISM_CONFIG_EP_SIZE": "2"}),
}
STEPS = {"lookup": "entry point lookup (PyTorch's own)", "hook": "the hook: import and call"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="fresh interpreters per kind of process")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
    else:
        print(table(take_turns(arguments.rounds)))


def measure(kind: str) -> dict[str, float]:
    """Seconds of each step in this very interpreter, which must be fresh."""
    sys.argv = KINDS[kind][0]
    started = time.perf_counter()
    import torch  # noqa: F401

    imported = time.perf_counter()
    found = [entry for entry in entry_points(group="torch.backends") if entry.name == "expertmesh"]
    looked_up = time.perf_counter()
    found[0].load()()
    called = time.perf_counter()
    return {"torch": imported - started, "lookup": looked_up - imported, "hook": called - looked_up}


def take_turns(rounds: int) -> dict[str, list[dict[str, float]]]:
    """`rounds` measurements of every kind, after one that only fills the caches."""
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for index in range(rounds + 1):
        for kind, measured in results.items():
            result = _measure_in_fresh_interpreter(kind)
            if index > 0:
                measured.append(result)
    return results


def _measure_in_fresh_interpreter(kind: str) -> dict[str, float]:
    environment = {**os.environ, **KINDS[kind][1], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", kind]
    child = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(child.stdout)


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """A Markdown table in milliseconds."""
    lines = [
        "| process | step | n | median ms | fastest ms | 90th percentile ms | share of `import torch` |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind, measured in results.items():
        whole = statistics.median(result["torch"] for result in measured)
        for step, name in STEPS.items():
            times = [result[step] for result in measured]
            median = statistics.median(times)
            late = statistics.quantiles(times, n=10)[-1]
            lines.append(
                f"| {kind} | {name} | {len(times)} | {median * 1e3:.3f} | {min(times) * 1e3:.3f} | {late * 1e3:.3f} "
                f"| {median / whole:.3%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
