"""A pair of processes per arm that live as long as the benchmark, and a coordinator's handle on them.

Each arm has its own processes so that its peak memory is its own. They wait in a blocking read while another arm runs,
so that only one arm uses the cores at a time.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, NoReturn

from step_arms import ARMS, RANKS, WORKLOADS

REPLY_SECONDS = 300


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


class ArmProcesses:
    """The processes of one arm. Use as a context manager: leaving it ends them, whatever they are doing."""

    def __init__(self, arm: str, workload: str, saved: Path, lifetime: float) -> None:
        self.arm = arm
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._processes, self._connections = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (theirs, arm, workload, saved, rank, port, lifetime)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> ArmProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait_until_built(self) -> None:
        self._replies()

    def run(self, steps: int) -> list[StepRecord]:
        """Run some steps, all ranks at once."""
        return [StepRecord.of_ranks(ranks) for ranks in zip(*self._call("run", steps), strict=True)]

    def forget_peak_memory(self) -> None:
        self._call("forget_peak_memory")

    def peak_memory_mib(self) -> float:
        """The largest resident set of any rank since `forget_peak_memory`."""
        return max(self._call("peak_memory_mib"))

    def profile(self) -> str:
        """Rank 0's most expensive operators in one step."""
        return self._call("profile")[0]

    def _call(self, method: str, *arguments: object) -> list[Any]:
        for connection in self._connections:
            connection.send((method, arguments))
        return self._replies()

    def _replies(self) -> list[Any]:
        """One reply a rank. A rank that died has closed its pipe; one that hangs is caught by the deadline."""
        deadline = time.monotonic() + REPLY_SECONDS
        replies: dict[Connection, Any] = {}
        while len(replies) < RANKS:
            waiting = [connection for connection in self._connections if connection not in replies]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"arm {self.arm}: no answer within {REPLY_SECONDS} s")
            for connection in ready:
                try:
                    replies[connection] = connection.recv()
                except EOFError:
                    raise RuntimeError(f"arm {self.arm}: a process ended; its traceback is above") from None
        return [replies[connection] for connection in self._connections]


class Worker:
    """One rank of one arm."""

    def __init__(self, arm: str, workload: str, saved: Path, rank: int) -> None:
        _, build = ARMS[arm]
        self._workload = WORKLOADS[workload]
        self._rank = rank
        self._step = build(saved)
        self._steps_done = 0

    def run(self, steps: int) -> list[RankStep]:
        return [self._timed_step() for _ in range(steps)]

    def forget_peak_memory(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak_memory_mib(self) -> float:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024

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


def _serve(
    connection: Connection, arm: str, workload: str, saved: Path, rank: int, port: int, lifetime: float
) -> NoReturn:
    """A worker's life: build the arm, then answer `(method, arguments)` until the coordinator is gone."""
    faulthandler.dump_traceback_later(lifetime, exit=True)
    Thread(target=_end_with_the_coordinator, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
    )
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    worker = Worker(arm, workload, saved, rank)
    connection.send("built")
    while True:
        method, arguments = connection.recv()
        connection.send(getattr(worker, method)(*arguments))


def _end_with_the_coordinator() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
