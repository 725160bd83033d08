"""Training on CPUs: keep memory that was freed instead of returning it to the kernel.

PyTorch has a caching allocator for accelerators and none for CPUs. glibc gives every block of more than 32 MiB back at
once, and the top of its heap whenever 64 MiB of it are free, so that each step faults the same pages in again, one by
one, and has them zeroed. `benchmarks/README.md` has the measurement.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


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
