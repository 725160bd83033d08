"""Two or more ranks forked from one process that has imported everything already: an attempt costs no imports.

For programs that start ranks many times. The process that forks must not have computed or communicated: its threads
would not survive.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

Say = Callable[[str], None]


class Ranks:
    """Running ranks.

    Args:
        num_ranks: how many.
        store: a file that does not exist yet, where they meet.
        work: called on each rank as `work(say)`; `say(line)` reaches `heard`.
    """

    def __init__(self, num_ranks: int, store: Path, work: Callable[[Say], None]) -> None:
        self._output, write_end = os.pipe()
        self._buffer = b""
        self.pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, num_ranks, store, work, write_end)
            self.pids.append(pid)
        os.close(write_end)

    def heard(self, timeout: float) -> list[str]:
        """The next lines that ranks said; empty when they all ended or nothing was said for `timeout` seconds."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._output], [], [], timeout)
            data = os.read(self._output, 1 << 16) if ready else b""
            if not data:
                return []
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [line.decode() for line in lines]

    def kill(self) -> list[str]:
        """SIGKILL all at once and wait for them; returns what they said that nobody heard."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        lines = []
        while more := self.heard(0):
            lines += more
        os.close(self._output)
        return lines

    def finish(self, timeout: float) -> list[str]:
        """Wait for all to end well; returns what they said that nobody heard."""
        lines, deadline = [], time.monotonic() + timeout
        while more := self.heard(max(0.0, deadline - time.monotonic())):
            lines += more
        late = time.monotonic() > deadline
        for pid in self.pids if late else ():
            os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        os.close(self._output)
        if any(codes):
            raise AssertionError(f"ranks {'did not finish' if late else 'failed'}: exit codes {codes}")
        return lines


def _be_rank(rank: int, num_ranks: int, store: Path, work: Callable[[Say], None], write_end: int) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        work(lambda line: os.write(write_end, line.encode() + b"\n"))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
