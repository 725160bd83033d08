"""Start real processes for a test, and never leave one behind.

Every distributed test goes through `run_ranks` (our own programs, one process a rank) or `run_command` (a launcher that
starts the ranks itself). Both have a deadline, kill the whole process group when it passes, and put everything the
processes printed into the failure.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


@dataclass(frozen=True)
class Finished:
    """How a process ended: its exit status and what it printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a test process: one thread, no network, no settings inherited from an outer launch."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "EXPERTMESH_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    env.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
    env.update(extra or {})
    return env


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float = 180,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run one command to its end, or kill it with all its children after `timeout` seconds and fail the test."""
    (finished,) = _run_all([command], [clean_environment(env)], timeout, cwd)
    return finished


def run_ranks(
    program: Path,
    num_processes: int,
    *arguments: str | Path,
    timeout: float = 180,
    env: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Run `python program *arguments` once per rank with torch.distributed's environment set; every rank must succeed.

    Returns what each rank printed, in rank order.
    """
    port = str(free_port())
    environments = [
        clean_environment(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "LOCAL_WORLD_SIZE": str(num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(env or {}),
            }
        )
        for rank in range(num_processes)
    ]
    command = [sys.executable, program, *arguments]
    ranks = _run_all([command] * num_processes, environments, timeout, None)
    if any(rank.returncode for rank in ranks):
        raise AssertionError(f"a rank of {program.name} failed\n{_transcript(ranks)}")
    return ranks


def _run_all(
    commands: Sequence[Sequence[str | Path]],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
    cwd: Path | None,
) -> list[Finished]:
    """Start all commands, wait for all of them; once one fails the others get ten more seconds."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for index, (command, env) in enumerate(zip(commands, environments, strict=True)):
            paths = [Path(folder, f"{index}.{name}") for name in ("out", "err")]
            with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
                process = subprocess.Popen(
                    [str(part) for part in command], stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
                )
            running.append((process, paths))
        late = _wait([process for process, _ in running], time.monotonic() + timeout)
        finished = [
            Finished(process.returncode, *(p.read_text(errors="replace") for p in paths)) for process, paths in running
        ]
    if late:
        raise AssertionError(f"not finished after {timeout:.0f} s: {commands[0]}\n{_transcript(finished)}")
    return finished


def _wait(processes: list[subprocess.Popen], deadline: float) -> bool:
    """True if the deadline passed with every process healthy but some unfinished. No process survives this call."""
    late = False
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.returncode for process in processes if process.returncode is not None):
            failed, deadline = True, min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            late = not failed
            break
        time.sleep(0.05)
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        process.wait()
    return late


def _transcript(ranks: Sequence[Finished]) -> str:
    return "\n".join(f"===== process {i}, exit status {rank.returncode}\n{rank.output}" for i, rank in enumerate(ranks))
