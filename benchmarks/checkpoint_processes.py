"""What a rank's save or load costs, as the operating system counts it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread

import torch.distributed as dist
from arm_processes import ArmProcesses, forget_peak_memory, memory_mib
from checkpoint_arms import ARMS

SAMPLING_SECONDS = 0.005
MIB = 2**20
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """One save or load on one rank; sizes in bytes.

    Attributes:
        seconds: from a barrier until this rank is done.
        dirtied: `write_bytes`: pages of files that this process was the first to dirty.
        written: `wchar`: given to `write`, which is also how gloo sends to other ranks.
        read: `rchar`: got from `read`; neither what gloo receives nor what is read through `mmap`.
        mapped: pages of files that became resident through `mmap`, which is how safetensors reads; sampled.
        growth: by how much the peak of the resident set exceeded what was resident before.
    """

    seconds: float
    dirtied: int
    written: int
    read: int
    mapped: int
    growth: int


class Measurement:
    """Measures its `with` block; `usage` is there afterwards. Starts with a barrier."""

    usage: Usage

    def __enter__(self) -> Measurement:
        dist.barrier()
        forget_peak_memory()
        self._resident = memory_mib("VmRSS")
        self._mapped = MappedPages()
        self._counters = _io_counters()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        counted = {name: value - self._counters[name] for name, value in _io_counters().items()}
        self.usage = Usage(
            seconds=seconds,
            dirtied=counted["write_bytes"],
            written=counted["wchar"],
            read=counted["rchar"],
            mapped=self._mapped.stop(),
            growth=int((memory_mib("VmHWM") - self._resident) * MIB),
        )


class MappedPages:
    """Adds up the growth of this process's resident file pages until it is stopped, from a thread of its own."""

    def __init__(self) -> None:
        self._stopped = Event()
        self._last = _file_pages()
        self._grown = 0
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """How many bytes were mapped."""
        self._stopped.set()
        self._thread.join()
        self._sample()
        return self._grown * PAGE_SIZE

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLING_SECONDS):
            self._sample()

    def _sample(self) -> None:
        now = _file_pages()
        self._grown += max(now - self._last, 0)
        self._last = now


class CheckpointProcesses(ArmProcesses):
    """The processes of one arm."""

    def __init__(self, arm: str, saved: Path, ranks: int, lifetime: float) -> None:
        super().__init__(arm, partial(Worker, arm, saved), ranks, lifetime)

    def save(self, folder: Path) -> list[Usage]:
        return self.call("save", folder)

    def load(self, folder: Path) -> list[Usage]:
        return self.call("load", folder)


class Worker:
    """One rank of one arm."""

    def __init__(self, arm: str, saved: Path, rank: int) -> None:
        self._arm = ARMS[arm](saved)
        self._rank = rank
        self._expected = self._arm.fingerprint()

    def save(self, folder: Path) -> Usage:
        with Measurement() as measurement:
            self._arm.save(folder)
        return measurement.usage

    def load(self, folder: Path) -> Usage:
        """Load what `save` wrote, into a model that has lost its weights.

        Raises:
            RuntimeError: the weights are not the ones that were saved.
        """
        self._arm.forget()
        with Measurement() as measurement:
            self._arm.load(folder)
        if self._arm.fingerprint() != self._expected:
            raise RuntimeError(f"{self._arm.name}: rank {self._rank} did not get back the weights it had saved")
        return measurement.usage


def _io_counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _file_pages() -> int:
    """Resident pages of this process that belong to files or shared memory."""
    return int(Path("/proc/self/statm").read_text().split()[2])
