"""Choosing a dispatcher: by name, or the best one that works."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.protocol import TokenDispatcher
from expertmesh.dispatch.registry import FALLBACK, find_transport, transport_names
from expertmesh.dispatch.transport import Situation
from expertmesh.dispatch.transported import TransportDispatcher
from expertmesh.errors import ConfigError

logger = logging.getLogger(__name__)

# What `auto` tries, best first. Other packages' dispatchers are taken where somebody asks for them.
PREFERENCE = ("deepep", "hybridep", "te_ep", FALLBACK)


@dataclass(frozen=True)
class Choice:
    """The outcome of a choice.

    Attributes:
        name: what was chosen.
        refused: what would have been better, with the reason why it does not work here.
    """

    name: str
    refused: dict[str, str]

    def __str__(self) -> str:
        reasons = "".join(f"; {name} was not chosen: {reason}" for name, reason in self.refused.items())
        return f"tokens travel by {self.name}{reasons}"


def check_dispatcher(name: str) -> None:
    """Refuse a name that nobody registered.

    Raises:
        ConfigError: says which names there are.
    """
    if name != "auto":
        find_transport(name)


def choose(name: str, situation: Situation) -> Choice:
    """What `ep_dispatcher` means in a situation. `auto` takes the first of `PREFERENCE` that works.

    Raises:
        ConfigError: a dispatcher that was asked for by name does not work; it is never replaced by another.
    """
    if name != "auto":
        refusal = find_transport(name).refusal(situation)
        if refusal is not None:
            raise ConfigError(f"ep_dispatcher {name} cannot be used here: {refusal} `auto` takes what works.")
        return Choice(name, {})
    refused = {}
    for candidate in PREFERENCE:
        if candidate not in transport_names():
            continue
        reason = find_transport(candidate).refusal(situation)
        if reason is None:
            return Choice(candidate, refused)
        refused[candidate] = reason
    raise AssertionError(f"{FALLBACK} refuses nothing")


def build_dispatcher(name: str, ep_mesh: DeviceMesh, situation: Situation) -> TokenDispatcher:
    """The dispatcher for all experts modules with the same situation. Logs, once, what `auto` came to.

    Args:
        name: `auto` or one of `transport_names()`.
        ep_mesh: 1-D mesh of the EP group.
        situation: what it has to do.

    Raises:
        ConfigError: see `choose`.
    """
    if ep_mesh.size() == 1:
        check_dispatcher(name)
        return LocalDispatcher(situation.num_experts)
    choice = choose(name, situation)
    if name == "auto" and dist.get_rank() == 0:
        # On a CPU there is nothing better to be had; on an accelerator somebody will want to know.
        missed = choice.name == FALLBACK and situation.device.type != "cpu"
        logger.log(logging.WARNING if missed else logging.INFO, "%s", choice)
    return TransportDispatcher(find_transport(choice.name)(ep_mesh, situation))
