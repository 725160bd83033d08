"""How the programs of ranks end."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """End this process successfully, without taking the interpreter down.

    gloo's threads may abort a process that ends right behind a collective (pytorch#179291), which says nothing about
    what was tested. Users' scripts have `expertmesh.gloo_exit`, and the tests that launch scripts end like them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)
