"""What one rank of one arm of the step benchmark does, and a coordinator's handle on all of the arm's ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from arm_processes import ArmProcesses, forget_peak_memory, memory_mib
from step_arms import RANKS, BuildStep, Workload


class RankStep(NamedTuple):
    """One step on one rank. Processor time leaves out the waiting, for the other rank and for other people's work."""

    seconds: float
    cpu_seconds: float
    loss: float


@dataclass(frozen=True)
class StepRecord:
    """A step of all ranks: until the slower one was done, the busier one's processor time, and the mean loss."""

    milliseconds: float
    cpu_milliseconds: float
    loss: float

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankStep]) -> StepRecord:
        return cls(
            milliseconds=1e3 * max(rank.seconds for rank in ranks),
            cpu_milliseconds=1e3 * max(rank.cpu_seconds for rank in ranks),
            loss=sum(rank.loss for rank in ranks) / len(ranks),
        )


class StepProcesses(ArmProcesses):
    """The pair of processes of one arm."""

    def __init__(self, arm: str, build: BuildStep, workload: Workload, saved: Path, lifetime: float) -> None:
        super().__init__(arm, partial(Worker, build, workload, saved), RANKS, lifetime)

    def run(self, steps: int) -> list[StepRecord]:
        """Run some steps, all ranks at once."""
        return [StepRecord.of_ranks(ranks) for ranks in zip(*self.call("run", steps), strict=True)]

    def forget_peak_memory(self) -> None:
        self.call("forget_peak_memory")

    def peak_memory_mib(self) -> float:
        """The largest resident set of any rank since `forget_peak_memory`."""
        return max(self.call("peak_memory_mib"))

    def profile(self) -> str:
        """Rank 0's most expensive operators in one step."""
        return self.call("profile")[0]


class Worker:
    """One rank of one arm."""

    def __init__(self, build: BuildStep, workload: Workload, saved: Path, rank: int) -> None:
        self._workload = workload
        self._rank = rank
        self._step = build(saved)
        self._steps_done = 0

    def run(self, steps: int) -> list[RankStep]:
        return [self._timed_step() for _ in range(steps)]

    def forget_peak_memory(self) -> None:
        forget_peak_memory()

    def peak_memory_mib(self) -> float:
        return memory_mib("VmHWM")

    def profile(self) -> str:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self._timed_step()
        return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)

    def _timed_step(self) -> RankStep:
        """The barrier, in the arm without collectives too, only lets the ranks start together."""
        import torch.distributed

        tokens = self._workload.tokens(self._steps_done, self._rank)
        torch.distributed.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = self._step(tokens)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        self._steps_done += 1
        return RankStep(seconds, cpu_seconds, loss.item())
