"""Freed host memory is kept on CPUs, unless somebody tuned malloc already."""

from __future__ import annotations

import sys

import pytest
from processes import run_command

# 40 MiB blocks are beyond glibc's own limit for keeping them.
FAULTS = """
import resource
from expertmesh.host_memory import keep_freed_memory
print(keep_freed_memory())
for attempt in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(40 << 20)
    block[::4096] = bytes(len(block) // 4096)
    del block
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("tuned", [False, True])
def test_a_freed_block_is_not_faulted_in_again(tuned):
    environment = {"MALLOC_ARENA_MAX": "4"} if tuned else {}
    finished = run_command((sys.executable, "-c", FAULTS), env=environment)
    kept, first, second = finished.stdout.split()
    assert kept == str(not tuned), finished.output
    assert int(first) > 5000
    assert (int(second) > 5000) == tuned
