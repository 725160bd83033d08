"""Moving tokens to their experts and back: how fast, and what it makes a device do.

    python benchmarks/dispatch.py --rounds 10 --json numbers.json

Two tables, of processes that this program starts itself; see README.md beside this file. *Time*: every dispatcher that
works on this machine, without experts, taking turns; on GPUs where there are several (NCCL, one process each), on CPUs
(gloo) otherwise. *Counts*: a forward and a backward of one MoE layer, on CPUs, engines that need a GPU being emulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Before anything imports torch, here and in the processes that inherit this environment.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from arm_processes import rotated
from dispatch_arms import COUNTED, TIMED, TRANSFORMERS, Sizes
from dispatch_processes import DispatchProcesses, LayerStep, Moved
from tables import markdown, quartiles
from transformers.utils import logging

# bfloat16 has eight bits.
TOLERANCE = 0.02
MIB = 2**20


@dataclass
class Timed:
    """What was seen of a dispatcher that moved tokens."""

    moved: list[Moved]
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [second for seconds in self.rounds for second in seconds]

    def ratio_to(self, other: Timed) -> float:
        """How many times the other's time this takes: the median over the rounds, in each of which both ran."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class Setting:
    """What a run measures, and where."""

    sizes: Sizes
    ranks: int
    device_type: str
    rounds: int
    steps_per_round: int
    lifetime: float


def count(setting: Setting, arms: Sequence[str], saved: Path) -> dict[str, list[LayerStep]]:
    """A step of a layer on every rank, one arm after the other, on CPUs."""
    with DispatchProcesses(setting.sizes, saved, setting.ranks, "cpu", setting.lifetime) as processes:
        processes.wait_until_built()
        steps = {arm: processes.count(arm) for arm in arms}
    _require_same_results(steps)
    return steps


def measure(setting: Setting, arms: Sequence[str], saved: Path) -> tuple[dict[str, Timed], dict[str, str]]:
    """Let the arms that work here take turns. Returns what was seen of them, and why the others do not."""
    with DispatchProcesses(setting.sizes, saved, setting.ranks, setting.device_type, setting.lifetime) as processes:
        processes.wait_until_built()
        refused = {arm: reason for arm in arms if (reason := processes.build(arm)) is not None}
        working = [arm for arm in arms if arm not in refused]
        for arm in working:
            processes.time(arm, 2)
        results = {arm: Timed(processes.look_at(arm)) for arm in working}
        for turn in range(setting.rounds):
            for arm in rotated(working, turn):
                results[arm].rounds.append(processes.time(arm, setting.steps_per_round))
    return results, refused


def table_of_times(setting: Setting, results: Mapping[str, Timed], refused: Mapping[str, str]) -> str:
    """A Markdown table."""
    sizes, where = setting.sizes, "GPUs, NCCL, bfloat16" if setting.device_type == "cuda" else "CPUs, gloo, float32"
    columns = (
        "dispatcher",
        "median ms",
        "quartiles ms",
        "million rows/s",
        "MB sent a rank",
        "time / all_to_all",
        "kernels",
    )
    rows = (_time_row(arm, result, setting, results) for arm, result in results.items())
    reasons = "".join(f"\n- {arm} does not work here: {reason}" for arm, reason in refused.items())
    return (
        f"Tokens there and back and their gradients, on {setting.ranks} {where}: {sizes.tokens} tokens a rank, hidden "
        f"{sizes.hidden}, {sizes.num_experts} experts, top-{sizes.top_k}\n\n"
        f"{markdown(columns, rows)}\n{reasons}"
    )


def table_of_counts(setting: Setting, steps: Mapping[str, Sequence[LayerStep]]) -> str:
    """A Markdown table; each number is the largest of all ranks."""
    sizes = setting.sizes
    columns = (
        "dispatcher",
        "host syncs",
        "launched ops",
        "of Transformers'",
        "MB sent a rank",
        "kept for backward MiB",
        "peak extra MiB",
        "how",
    )
    rows = (_count_row(arm, ranks, steps) for arm, ranks in steps.items())
    return (
        f"One MoE layer, forward and backward, in bfloat16 on {setting.ranks} ranks: {sizes.tokens} tokens a rank, "
        f"hidden {sizes.hidden}, expert intermediate {sizes.intermediate}, {sizes.num_experts} experts, "
        f"top-{sizes.top_k}, grouped GEMMs\n\n"
        f"{markdown(columns, rows)}"
    )


def _time_row(arm: str, result: Timed, setting: Setting, results: Mapping[str, Timed]) -> list[str]:
    times = [1e3 * second for second in result.seconds]
    low, middle, high = quartiles(times)
    rows = setting.ranks * setting.sizes.tokens * setting.sizes.top_k / middle / 1e3
    sent = max(moved.sent_bytes for moved in result.moved) / 1e6
    ratio = f"{result.ratio_to(results['all_to_all']):.2f}" if "all_to_all" in results else ""
    kernels = result.moved[0].kernels
    return [
        TIMED[arm].title,
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{rows:.2f}",
        f"{sent:.2f}",
        ratio,
        "" if kernels is None else str(kernels),
    ]


def _count_row(arm: str, ranks: Sequence[LayerStep], steps: Mapping[str, Sequence[LayerStep]]) -> list[str]:
    counts = [step.counts for step in ranks]
    share = ""
    if TRANSFORMERS in steps:
        theirs = max(step.counts.launches for step in steps[TRANSFORMERS])
        share = f"{max(each.launches for each in counts) / theirs:.0%}"
    return [
        COUNTED[arm].title,
        str(max(len(each.syncs) for each in counts)),
        str(max(each.launches for each in counts)),
        share,
        f"{max(each.sent_bytes for each in counts) / 1e6:.2f}",
        f"{max(each.kept_bytes for each in counts) / MIB:.1f}",
        f"{max(each.peak_bytes for each in counts) / MIB:.1f}",
        "counted" if COUNTED[arm].emulation is None else "emulated: counts only",
    ]


def _require_same_results(steps: Mapping[str, Sequence[LayerStep]]) -> None:
    """Refuse to compare arms that do not compute the same."""
    first, *others = steps
    for arm in others:
        for theirs, ours in zip(steps[first], steps[arm], strict=True):
            for one, other in zip(theirs.digest, ours.digest, strict=True):
                if not abs(one - other) <= TOLERANCE * abs(one):
                    raise SystemExit(f"{first} and {arm} do not compute the same: {theirs.digest}, {ours.digest}")


def _details(steps: Mapping[str, Sequence[LayerStep]]) -> str:
    """Which operators rank 0 launched, and what made it wait."""
    parts = []
    for arm, (step, *_) in steps.items():
        launched = ", ".join(f"{name} {times}" for name, times in sorted(step.counts.launched.items()))
        parts.append(f"- {arm}: {launched}. Host syncs: {', '.join(step.counts.syncs) or 'none'}.")
    return "\n".join(parts)


def _arguments() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=("time", "counts"), default=["time", "counts"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus > 1 else "cpu")
    parser.add_argument("--ranks", type=int, help="processes; by default all GPUs, or 2 without", default=None)
    parser.add_argument("--timed", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--counted", nargs="+", choices=COUNTED, default=list(COUNTED))
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--details", action="store_true", help="name the operators that were launched")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    parser.add_argument("--lifetime", type=float, default=900, help="seconds after which a process ends itself")
    chosen = parser.parse_args()
    if chosen.ranks is None:
        chosen.ranks = gpus if chosen.device == "cuda" else 2
    return chosen


def main() -> None:
    chosen = _arguments()
    logging.disable_progress_bar()
    sizes = Sizes(chosen.tokens, chosen.hidden, chosen.intermediate, chosen.experts, chosen.top_k)
    setting = Setting(sizes, chosen.ranks, chosen.device, chosen.rounds, chosen.steps_per_round, chosen.lifetime)
    measured: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder)
        if "time" in chosen.tables:
            results, refused = measure(setting, chosen.timed, saved)
            measured["time"] = {arm: asdict(result) for arm, result in results.items()}
            measured["refused"] = refused
            print(table_of_times(setting, results, refused), end="\n\n", flush=True)
        if "counts" in chosen.tables:
            sizes.save_model(saved)
            steps = count(setting, chosen.counted, saved)
            measured["counts"] = {arm: [asdict(step) for step in ranks] for arm, ranks in steps.items()}
            print(table_of_counts(setting, steps), flush=True)
            if chosen.details:
                print(f"\n{_details(steps)}")
    if chosen.json:
        chosen.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
