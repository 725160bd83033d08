"""Choosing a dispatcher by name."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.all_to_all import AllToAllDispatcher
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.protocol import TokenDispatcher
from expertmesh.errors import ConfigError

# `auto` picks the first. Engines that need a GPU come with their own plugins.
DISPATCHERS = ("all_to_all",)
NOT_IN_THIS_VERSION = {
    "deepep": "the DeepEP dispatcher is not part of this version",
    "hybridep": "the HybridEP dispatcher is not part of this version",
}


def check_dispatcher(name: str) -> None:
    """Refuse a dispatcher that cannot be built.

    Raises:
        ConfigError: says why, and which names work.
    """
    if name in ("auto", *DISPATCHERS):
        return
    reason = NOT_IN_THIS_VERSION.get(name, f"ep_dispatcher {name!r} is unknown")
    raise ConfigError(f"{reason}: set ep_dispatcher to auto or {', '.join(DISPATCHERS)}.")


def build_dispatcher(name: str, ep_mesh: DeviceMesh, num_experts: int) -> TokenDispatcher:
    """The dispatcher for one experts module.

    Args:
        name: `auto` or one of `DISPATCHERS`.
        ep_mesh: 1-D mesh of the EP group.
        num_experts: experts over all ranks of the group.

    Raises:
        ConfigError: see `check_dispatcher`.
    """
    check_dispatcher(name)
    if ep_mesh.size() == 1:
        return LocalDispatcher(num_experts)
    return AllToAllDispatcher(ep_mesh, num_experts)
