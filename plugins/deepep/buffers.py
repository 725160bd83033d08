"""The engines' communication buffers: one for all layers that can share it, built and destroyed by all ranks together.

A buffer of DeepEP is hundreds of MiB on every GPU, and building one talks to all ranks. They are built with
`explicitly_destroy`, so that nothing is destroyed by chance: a destructor that waits for other ranks while the
interpreter ends hangs. They are destroyed when training ends (`expertmesh.dispatch.close_engines`), or else when a
process ends in good order and its process group still lives. If neither happened the memory goes with the process.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.closing import close_with_training

Buffer = TypeVar("Buffer")

_BUFFERS: dict[Hashable, Any] = {}


def shared_buffer(kind: Hashable, ep_mesh: DeviceMesh, build: Callable[[], Buffer]) -> Buffer:
    """The buffer of a kind for a group, built at the first call. Collective over the group.

    Args:
        kind: all that makes a difference: the engine and the sizes.
        ep_mesh: the EP group.
        build: makes it.
    """
    key = (kind, tuple(dist.get_process_group_ranks(ep_mesh.get_group())))
    if not _BUFFERS:
        close_with_training(destroy_buffers)
        atexit.register(_at_exit)
    if key not in _BUFFERS:
        _BUFFERS[key] = build()
    return _BUFFERS[key]


def destroy_buffers() -> None:
    """Destroy all buffers. Collective; call it before `torch.distributed.destroy_process_group`."""
    while _BUFFERS:
        _, buffer = _BUFFERS.popitem()
        if hasattr(buffer, "destroy"):
            buffer.destroy()
    atexit.unregister(_at_exit)


def _at_exit() -> None:
    # After an error the other ranks may be elsewhere, and would be waited for.
    failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not failed:
        destroy_buffers()
