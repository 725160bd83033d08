"""Host memory: keeping what was freed, for training on CPUs, and having some that takes no room until it is used.

PyTorch has a caching allocator for accelerators and none for CPUs. glibc gives every block of more than 32 MiB back at
once, and the top of its heap whenever 64 MiB of it are free, so that each step faults the same pages in again, one by
one, and has them zeroed. `benchmarks/README.md` has the measurement.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from expertmesh.errors import ExpertMeshError

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1
# mman.h; Python 3.11 has no name for it.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def keep_freed_memory() -> bool:
    """Let this process's malloc keep what it has. The process stays as large as it once was.

    Does nothing where the user has already tuned malloc (`MALLOC_*`, `GLIBC_TUNABLES`) or replaced it (`LD_PRELOAD`).

    Returns:
        Whether the C library took the setting; False on others than glibc.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if tuned or mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor without a page behind it: reads give zeros, and writes take the pages they write to.

    Raises:
        ExpertMeshError: the kernel does not grant the address space.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise ExpertMeshError(
            f"the kernel does not grant {nbytes} bytes of address space to a weight of which this rank keeps a part "
            f"({error.strerror}): lift `ulimit -v` or vm.overcommit_memory=2, or set EXPERTMESH_DEFERRED_LOAD=0."
        ) from error
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
