"""A rank's peak memory as the kernel counts it: the growth of the resident set over two steps of real training."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from functools import partial

from arm_processes import ArmProcesses, forget_peak_memory, memory_mib
from memory_arms import ARMS, Workload, adam, train_step

# Whatever is freed goes back at once, and kernels keep nothing for their next call: what is resident is what is alive.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
    "LRU_CACHE_CAPACITY": "1",
}


class Worker:
    """One rank of one arm."""

    def __init__(self, arm: str, workload: Workload, rank: int) -> None:
        import torch

        torch.manual_seed(0)
        self._arm, self._workload = arm, workload
        self._tokens = torch.randint(0, workload.vocabulary, (1, workload.tokens))

    def growth_gib(self) -> float:
        """The peak of two steps, less what was resident before there was a model.

        Building and spreading the model are left out: a script can load it in other ways.
        """
        # What libraries load and set up at the first step is not the model's.
        self._train(replace(self._workload, layers=1, tokens=64, vocabulary=64, hidden=64))
        _trim()
        before = memory_mib("VmRSS")
        self._train(self._workload)
        return (memory_mib("VmHWM") - before) / 1024

    def _train(self, workload: Workload) -> None:
        model = ARMS[self._arm].spread(workload.build())
        optimizer = adam(model)
        _trim()
        forget_peak_memory()
        for _ in range(2):
            train_step(model, optimizer, self._tokens[:, : workload.tokens] % workload.vocabulary)


def measure(arm: str, workload: Workload, lifetime: float) -> float:
    """The largest growth of any rank, in GiB."""
    os.environ.update(ENVIRONMENT)
    with ArmProcesses(arm, partial(Worker, arm, workload), workload.ranks, lifetime) as processes:
        processes.wait_until_built()
        return max(processes.call("growth_gib"))


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)
