"""Saving and loading one model, side by side: four ways of others to a Hugging Face folder, and expertmesh.

    python benchmarks/checkpoint.py --rounds 5 --json numbers.json

All arms run in one session, taking turns, on four CPU processes with one thread each; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

# Before anything imports torch, here and in the processes that inherit this environment.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from arm_processes import rotated
from checkpoint_arms import ARMS, SIZES, checksums
from checkpoint_processes import CheckpointProcesses
from checkpoint_report import ArmResult, Turn, report
from safetensors import safe_open
from step_arms import load, save_initial_model
from transformers.utils import logging


@dataclass(frozen=True)
class Original:
    """The model that all arms start from."""

    folder: Path
    num_bytes: int
    checksums: list[int]

    @classmethod
    def create(cls, size: str, folder: Path) -> Original:
        save_initial_model(SIZES[size], folder)
        weights = list(load(folder).parameters())
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        return cls(folder, num_bytes, checksums(weight.detach() for weight in weights))

    def require_equal(self, arm: str, folder: Path) -> None:
        """Refuse to compare an arm whose folder Transformers, alone in one process, does not read as this model."""
        if checksums(weight.detach() for weight in load(folder).parameters()) != self.checksums:
            raise SystemExit(f"arm {arm}: from_pretrained does not get the model back from what was saved")


@dataclass(frozen=True)
class Setting:
    """What a run measures, and where."""

    size: str
    arms: Sequence[str]
    ranks: int
    rounds: int
    lifetime: float
    folder: Path | None


def measure(setting: Setting) -> tuple[int, dict[str, ArmResult]]:
    """Start all arms, let them take turns, and end them. Returns the model's size in bytes and what was seen."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as scratch, ExitStack() as stack:
        original = Original.create(setting.size, Path(scratch, "original"))
        running = {arm: _start(arm, original, setting, stack) for arm in setting.arms}
        saved = Path(scratch, "saved")
        results = {arm: _warm_up(arm, processes, saved, original) for arm, processes in running.items()}
        for turn in range(setting.rounds):
            for arm in rotated(setting.arms, turn):
                results[arm].turns.append(_take_turn(running[arm], saved))
    return original.num_bytes, results


def _start(arm: str, original: Original, setting: Setting, stack: ExitStack) -> CheckpointProcesses:
    """One arm after the other, so that their peaks while building do not add up."""
    processes = CheckpointProcesses(arm, original.folder, setting.ranks, setting.lifetime)
    stack.enter_context(processes)
    processes.wait_until_built()
    return processes


def _warm_up(arm: str, processes: CheckpointProcesses, saved: Path, original: Original) -> ArmResult:
    """A save and a load whose times do not count, and a look at what was saved."""
    turn = _take_turn(processes, saved)
    original.require_equal(arm, saved)
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    return ArmResult(ARMS[arm].name, ARMS[arm].fsync, _names_of_experts(saved), size, warm_up=turn)


def _take_turn(processes: CheckpointProcesses, saved: Path) -> Turn:
    """Starts with an empty folder and nothing left to write back, so that no arm pays for the one before it."""
    shutil.rmtree(saved, ignore_errors=True)
    os.sync()
    save = processes.save(saved)
    start = time.perf_counter()
    os.sync()
    sync_seconds = time.perf_counter() - start
    return Turn(save, sync_seconds, processes.load(saved))


def _names_of_experts(saved: Path) -> str:
    names = [name for file in saved.glob("*.safetensors") for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    return "per expert" if any(re.search(r"\.experts\.\d+\.", name) for name in names) else "fused"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1GB")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--ranks", type=int, default=4, help="processes of an arm; must divide 64 experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on which file system to save; by default the temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measured number")
    parser.add_argument("--lifetime", type=float, default=1800, help="seconds after which a process ends itself")
    return parser.parse_args()


def main() -> None:
    chosen = _arguments()
    logging.disable_progress_bar()
    setting = Setting(chosen.size, chosen.arms, chosen.ranks, chosen.rounds, chosen.lifetime, chosen.folder)
    num_bytes, results = measure(setting)
    print(f"{num_bytes / 1e9:.3f} GB of float32 on {setting.ranks} ranks, {setting.rounds} rounds, warm page cache\n")
    print(report(num_bytes, results))
    if chosen.json:
        measured = {"model_bytes": num_bytes, "arms": {arm: asdict(result) for arm, result in results.items()}}
        chosen.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
