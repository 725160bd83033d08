"""One training step, side by side: Accelerate FSDP2, Transformers' expert parallelism, expertmesh, and the floor.

    python benchmarks/step.py --workload A B --rounds 8 --steps-per-round 3

All arms run in one session, taking turns, on two CPU processes with one thread each; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Before anything imports torch, here and in the processes that inherit this environment.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from arm_processes import rotated
from step_arms import ARMS, WORKLOADS, save_initial_model
from step_processes import StepProcesses, StepRecord
from tables import markdown, quartiles
from transformers.utils import logging

OURS = "c"
FLOOR = "d"
WARM_UP_STEPS = 3
LOSS_TOLERANCE = 5e-5


@dataclass
class ArmResult:
    """What was seen of one arm: the losses of the warm-up, the steps of each round, the peak resident set."""

    first_losses: list[float] = field(default_factory=list)
    rounds: list[list[StepRecord]] = field(default_factory=list)
    peak_mib: float = 0.0

    @property
    def steps(self) -> list[StepRecord]:
        return [step for steps in self.rounds for step in steps]

    def ratio_to(self, other: ArmResult) -> float:
        """How many times the other's time this arm takes: the median over the rounds, in each of which both ran."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(_median_time(mine) / _median_time(theirs) for mine, theirs in pairs)


def measure(
    workload: str, arms: Sequence[str], rounds: int, steps_per_round: int, lifetime: float
) -> dict[str, ArmResult]:
    """Start all arms of a workload, let them take turns, and end them. The floor computes no real loss."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        saved = Path(folder)
        save_initial_model(WORKLOADS[workload], saved)
        running = {arm: _start(arm, workload, saved, lifetime, stack) for arm in arms}
        return take_turns(running, set(arms) - {FLOOR}, rounds, steps_per_round)


def take_turns(
    running: Mapping[str, StepProcesses], compared: Collection[str], rounds: int, steps_per_round: int
) -> dict[str, ArmResult]:
    """Warm all arms up, then let each run a few steps in every round.

    Args:
        running: the arms.
        compared: those that must have the same losses.
        rounds, steps_per_round: how much is measured.
    """
    results = {arm: ArmResult() for arm in running}
    for arm, processes in running.items():
        results[arm].first_losses = [step.loss for step in processes.run(WARM_UP_STEPS)]
        processes.forget_peak_memory()
    _require_equal_losses({arm: results[arm].first_losses for arm in running if arm in compared})
    for turn in range(rounds):
        for arm in rotated(list(running), turn):
            results[arm].rounds.append(running[arm].run(steps_per_round))
    for arm, processes in running.items():
        results[arm].peak_mib = processes.peak_memory_mib()
    return results


def profile(workload: str, arm: str, lifetime: float) -> str:
    """The operators that one rank of an arm spends a warm step on."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        saved = Path(folder)
        save_initial_model(WORKLOADS[workload], saved)
        processes = _start(arm, workload, saved, lifetime, stack)
        processes.run(WARM_UP_STEPS)
        return processes.profile()


def table(workload: str, results: dict[str, ArmResult]) -> str:
    """A Markdown table of one workload."""
    sizes = WORKLOADS[workload]
    columns = (
        "arm",
        "median ms",
        "quartiles ms",
        "min to max ms",
        "CPU ms",
        "time / expertmesh",
        "floor / time",
        "peak RSS MiB",
    )
    rows = (_row(arm, result, results) for arm, result in results.items())
    return (
        f"Workload {workload}: hidden {sizes.hidden_size}, expert intermediate {sizes.moe_intermediate_size}, "
        f"{sizes.sequences} x {sizes.sequence_length} tokens a rank\n\n"
        f"{markdown(columns, rows)}\n\n"
        f"{_losses(results)}"
    )


def _start(arm: str, workload: str, saved: Path, lifetime: float, stack: ExitStack) -> StepProcesses:
    """One arm after the other, so that their peaks while building do not add up."""
    processes = stack.enter_context(StepProcesses(arm, ARMS[arm][1], WORKLOADS[workload], saved, lifetime))
    processes.wait_until_built()
    return processes


def _median_time(steps: Iterable[StepRecord]) -> float:
    return statistics.median(step.milliseconds for step in steps)


def _require_equal_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Refuse to compare arms that do not train the same model."""
    for step in zip(*losses.values(), strict=True):
        if max(step) - min(step) > LOSS_TOLERANCE:
            raise SystemExit(f"the arms do not train the same model, their first losses differ: {losses}")


def _row(arm: str, result: ArmResult, results: dict[str, ArmResult]) -> list[str]:
    times = [step.milliseconds for step in result.steps]
    cpu = statistics.median(step.cpu_milliseconds for step in result.steps)
    low, middle, high = quartiles(times)
    ratio = f"{result.ratio_to(results[OURS]):.2f}" if OURS in results else ""
    floor = f"{results[FLOOR].ratio_to(result):.0%}" if FLOOR in results else ""
    name, _ = ARMS[arm]
    return [
        f"({arm}) {name}",
        f"{middle:.0f}",
        f"{low:.0f} to {high:.0f}",
        f"{min(times):.0f} to {max(times):.0f}",
        f"{cpu:.0f}",
        ratio,
        floor,
        f"{result.peak_mib:.0f}",
    ]


def _losses(results: dict[str, ArmResult]) -> str:
    lines = [
        f"- ({arm}) " + ", ".join(f"{loss:.7f}" for loss in result.first_losses)
        for arm, result in results.items()
        if arm != FLOOR
    ]
    return "First losses:\n" + "\n".join(lines) if lines else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["A", "B"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--profile", metavar="ARM", choices=ARMS, help="print where one step of this arm goes, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measured number")
    parser.add_argument("--lifetime", type=float, default=1800, help="seconds after which a process ends itself")
    return parser.parse_args()


def main() -> None:
    chosen = _arguments()
    logging.disable_progress_bar()
    measured = {}
    for workload in chosen.workload:
        if chosen.profile:
            print(profile(workload, chosen.profile, chosen.lifetime))
            continue
        results = measure(workload, chosen.arms, chosen.rounds, chosen.steps_per_round, chosen.lifetime)
        measured[workload] = {arm: asdict(result) for arm, result in results.items()}
        print(table(workload, results), end="\n\n", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
