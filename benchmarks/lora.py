"""One step of expert LoRA, side by side: PEFT's own under Accelerate FSDP2 and in one process, and expertmesh.

    python benchmarks/lora.py --workload A --rounds 8 --steps-per-round 3

All arms run in one session, taking turns; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

# First: it sets what everything that imports torch must find.
from step import ArmResult, take_turns  # isort: skip

from lora_arms import ARMS, RANK, merged_bytes
from lora_processes import AdapterMemory, AdapterProcesses
from step_arms import WORKLOADS, save_initial_model
from tables import markdown, quartiles
from transformers.utils import logging

PEFT, OURS = "a", "d"
MIB = 2**20
WORKLOAD_NAMES = ("A", "smoke")


@dataclass
class LoraResult:
    """What was seen of one arm."""

    steps: ArmResult
    memory: AdapterMemory


def measure(
    workload: str, arms: Sequence[str], rounds: int, steps_per_round: int, lifetime: float
) -> dict[str, LoraResult]:
    """Start all arms, look at their memory, let them take turns, and end them. One process sees other batches."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        saved = Path(folder)
        save_initial_model(WORKLOADS[workload], saved)
        running = {arm: _start(arm, workload, saved, lifetime, stack) for arm in arms}
        memory = {arm: processes.memory() for arm, processes in running.items()}
        compared = {arm for arm in arms if ARMS[arm].ranks == ARMS[OURS].ranks}
        results = take_turns(running, compared, rounds, steps_per_round)
    return {arm: LoraResult(results[arm], memory[arm]) for arm in arms}


def profile(workload: str, arm: str, lifetime: float) -> str:
    """The operators that one rank of an arm spends a warm step on."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        saved = Path(folder)
        save_initial_model(WORKLOADS[workload], saved)
        processes = _start(arm, workload, saved, lifetime, stack)
        processes.run(2)
        return processes.profile()


def table(workload: str, results: dict[str, LoraResult]) -> str:
    """A Markdown table."""
    sizes = WORKLOADS[workload]
    columns = (
        "arm", "median ms", "quartiles ms", "CPU ms", "a / time", "growth MiB", "saved MiB", "merged MiB",
    )  # fmt: skip
    return (
        f"Workload {workload}, adapters of rank {RANK}: hidden {sizes.hidden_size}, expert intermediate "
        f"{sizes.moe_intermediate_size}, {sizes.num_layers} layers, {sizes.sequences} x {sizes.sequence_length} tokens "
        f"a rank\n\n"
        f"{markdown(columns, (_row(workload, arm, results) for arm in results))}"
    )


def _start(arm: str, workload: str, saved: Path, lifetime: float, stack: ExitStack) -> AdapterProcesses:
    """One arm after the other, so that their peaks while building do not add up."""
    processes = stack.enter_context(AdapterProcesses(arm, ARMS[arm], WORKLOADS[workload], saved, lifetime))
    processes.wait_until_built()
    return processes


def _row(workload: str, arm: str, results: dict[str, LoraResult]) -> list[str]:
    steps, memory = results[arm].steps, results[arm].memory
    times = [step.milliseconds for step in steps.steps]
    low, middle, high = quartiles(times)
    cpu = statistics.median(step.cpu_milliseconds for step in steps.steps)
    faster = f"{results[PEFT].steps.ratio_to(steps):.2f}" if PEFT in results else ""
    saved = sum(nbytes for _, nbytes in memory.saved)
    merged = merged_bytes(WORKLOADS[workload], memory.saved)
    return [
        f"({arm}) {ARMS[arm].name}",
        f"{middle:.0f}",
        f"{low:.0f} to {high:.0f}",
        f"{cpu:.0f}",
        faster,
        f"{memory.growth_mib:.0f}",
        f"{saved / MIB:.1f}",
        f"{merged / MIB:.1f}",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOAD_NAMES, default="A")
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
    if chosen.profile:
        print(profile(chosen.workload, chosen.profile, chosen.lifetime))
        return
    results = measure(chosen.workload, chosen.arms, chosen.rounds, chosen.steps_per_round, chosen.lifetime)
    print(table(chosen.workload, results), flush=True)
    if chosen.json:
        numbers = {
            arm: {**asdict(result), "merged_bytes": merged_bytes(WORKLOADS[chosen.workload], result.memory.saved)}
            for arm, result in results.items()
        }
        chosen.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
