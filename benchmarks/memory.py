"""The peak memory of one rank that trains Qwen3-30B-A3B on 8, foreseen without GPUs, side by side.

    python benchmarks/memory.py                      # a table, by component
    python benchmarks/memory.py --json               # the same as one JSON object on the standard output
    python benchmarks/memory.py --check              # what is foreseen of a small model, against 2 real processes

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from memory_arms import ARMS, QWEN3_30B, SMALL, Workload
from memory_foreseen import foresee
from memory_measured import measure
from tables import markdown

# Each worker builds its process group anew, and an arm patches nothing of another.
_PROCESSES = 2


def foresee_all(arms: Sequence[str], workload: Workload) -> dict[str, dict[str, float]]:
    """`foresee` of several arms, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, context, max_tasks_per_child=1) as pool:
        found = pool.map(foresee, arms, [workload] * len(arms))
        return dict(zip(arms, found, strict=True))


def check(arms: Sequence[str], lifetime: float) -> dict[str, dict[str, float]]:
    """What is foreseen of a small model and what is measured of it, in GiB, and by how much the first is larger."""
    foreseen = foresee_all(arms, SMALL)
    results = {}
    for arm in arms:
        measured = measure(arm, SMALL, lifetime)
        peak = foreseen[arm]["peak_gib"]
        results[arm] = {"peak_gib": peak, "measured_gib": measured, "error": peak / measured - 1}
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """A Markdown table with a row for each arm, and a column for each number."""
    columns = list(next(iter(results.values())))
    rows = ([ARMS[arm].title, *(f"{found[name]:.2f}" for name in columns)] for arm, found in results.items())
    return markdown(["GiB", *columns], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, default=QWEN3_30B.layers, help="of the model that is foreseen")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--check", action="store_true", help="compare with real processes")
    parser.add_argument("--lifetime", type=float, default=300, help="seconds after which a real process ends itself")
    return parser.parse_args()


def main() -> None:
    chosen = _arguments()
    if chosen.check:
        results = check(chosen.arms, chosen.lifetime)
    else:
        results = foresee_all(chosen.arms, replace(QWEN3_30B, layers=chosen.layers))
    print(json.dumps(results, indent=2) if chosen.json else table(results))


if __name__ == "__main__":
    main()
