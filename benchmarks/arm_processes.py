"""The processes of one arm, which live as long as a benchmark, and a coordinator's handle on them.

Each arm has its own processes so that its memory is its own. They wait in a blocking read while another arm runs, so
that only one arm uses the cores at a time.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

REPLY_SECONDS = 300


class ArmProcesses:
    """The processes of one arm. Use as a context manager: leaving it ends them, whatever they are doing.

    Args:
        arm: the arm's name, for messages.
        build: makes one rank's worker, given its rank, in its own process, with torch.distributed initialised. What the
            coordinator calls are methods of that worker.
        ranks: how many processes.
        lifetime: seconds after which a process ends itself.
        device_type: `cpu`, with gloo; or `cuda`, with NCCL and one of the visible GPUs a process.
    """

    def __init__(
        self, arm: str, build: Callable[[int], object], ranks: int, lifetime: float, device_type: str = "cpu"
    ) -> None:
        self.arm = arm
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._processes, self._connections = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, build, rank, ranks, port, lifetime, device_type)
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

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every rank's worker at the same time; the answers in rank order."""
        for connection in self._connections:
            connection.send((method, arguments))
        return self._replies()

    def _replies(self) -> list[Any]:
        """One reply a rank. A rank that died has closed its pipe; one that hangs is caught by the deadline."""
        deadline = time.monotonic() + REPLY_SECONDS
        replies: dict[Connection, Any] = {}
        while len(replies) < len(self._connections):
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


def rotated(arms: Sequence[str], turn: int) -> Sequence[str]:
    """Another arm goes first in every round, so that none always follows the same one."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def forget_peak_memory() -> None:
    """Let the peak resident set of this process start anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_mib(line: str) -> float:
    """A size from this process's `/proc/self/status`: `VmHWM` is the peak resident set, `VmRSS` the present one."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{line}:\s+(\d+) kB", status)[1]) / 1024


def _serve(
    connection: Connection,
    build: Callable[[int], object],
    rank: int,
    ranks: int,
    port: int,
    lifetime: float,
    device_type: str,
) -> NoReturn:
    """A worker's life: build the arm, then answer `(method, arguments)` until the coordinator is gone."""
    faulthandler.dump_traceback_later(lifetime, exit=True)
    Thread(target=_end_with_the_coordinator, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if device_type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if device_type == "cpu":
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
    else:
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(rank)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    worker = build(rank)
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
