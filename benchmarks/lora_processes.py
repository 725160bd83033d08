"""What one rank of one arm of the LoRA benchmark does beside its steps, and a coordinator's handle on it."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arm_processes import ArmProcesses, forget_peak_memory, memory_mib
from lora_arms import Arm
from step_arms import Workload
from step_processes import StepProcesses, Worker


@dataclass(frozen=True)
class AdapterMemory:
    """What an arm's first steps took.

    Attributes:
        growth_mib: the peak resident set of the first step less what was resident before; the largest over the ranks.
        saved: shape and bytes of what rank 0's forward kept for the backward.
    """

    growth_mib: float
    saved: list[tuple[tuple[int, ...], int]]


class AdapterProcesses(StepProcesses):
    """The processes of one arm."""

    def __init__(self, arm: str, chosen: Arm, workload: Workload, saved: Path, lifetime: float) -> None:
        ArmProcesses.__init__(self, arm, partial(AdapterWorker, chosen.build, workload, saved), chosen.ranks, lifetime)

    def memory(self) -> AdapterMemory:
        """Run a step twice: to see how far memory grows, and to see what the forward keeps."""
        growth = max(self.call("growth_mib"))
        return AdapterMemory(growth, self.call("saved_for_backward")[0])


class AdapterWorker(Worker):
    """One rank of one arm."""

    def growth_mib(self) -> float:
        gc.collect()
        # What building the model has freed would be used again, and growth be missed.
        ctypes.CDLL(None).malloc_trim(0)
        forget_peak_memory()
        before = memory_mib("VmRSS")
        self.run(1)
        return memory_mib("VmHWM") - before

    def saved_for_backward(self) -> list[tuple[tuple[int, ...], int]]:
        return self._step.saved_for_backward(self._workload.tokens(self._steps_done, self._rank))
