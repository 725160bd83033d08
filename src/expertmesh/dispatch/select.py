"""Choosing a dispatcher: by name, or the best one that works. All ranks of a job choose the same.

Each rank asks the candidates by itself, without a message; then the answers are exchanged, and a candidate that is
refused on one rank is refused on all of them. So a rank on which some import fails leaves nobody waiting for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.protocol import TokenDispatcher
from expertmesh.dispatch.registry import FALLBACK, TRANSPORTS, refusal
from expertmesh.dispatch.transport import Situation
from expertmesh.dispatch.transported import TransportDispatcher
from expertmesh.errors import ConfigError, some
from expertmesh.ranks import gather

logger = logging.getLogger(__name__)

# What `auto` tries, best first. Other dispatchers are taken where somebody asks for them.
PREFERENCE = ("deepep", "hybridep", "te_ep", FALLBACK)

Answers = Mapping[str, str | None]
"""Names of dispatchers, with the reason why each is refused, or None."""


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
    """Refuse a name that nobody registered. Whether what was registered works is not asked here.

    Raises:
        ConfigError: says which names there are.
    """
    TRANSPORTS.check(name)


def ask(name: str, situation: Situation) -> dict[str, str | None]:
    """What this rank says to a name, or to each of `PREFERENCE` in order if it is `auto`. Does not communicate."""
    if name != "auto":
        return {name: refusal(name, situation)}
    return {candidate: refusal(candidate, situation) or ill_advised(candidate, situation) for candidate in PREFERENCE}


def ill_advised(name: str, situation: Situation) -> str | None:
    """Why `auto` passes over a dispatcher that does not refuse: what can be seen of the way between the ranks.

    Where nothing can be seen the dispatcher's own word counts, and so it does where somebody asks for it by name.
    """
    if name == FALLBACK:
        return None
    if not situation.is_inside_node and situation.topology.rdma is False:
        return (
            f"the {situation.ep_size} ranks of an EP group are on several machines, and this one has no RDMA card that "
            f"is up: set ep_size to at most {situation.ranks_per_node}, or ep_dispatcher to {name} if you know better."
        )
    if situation.is_inside_node and situation.topology.link == "pcie":
        return (
            f"not all GPUs of this machine are joined by NVLink, which it is made for: set ep_dispatcher to {name} if "
            f"you know better."
        )
    return None


def choose(name: str, answers: Answers) -> Choice:
    """What `ep_dispatcher` means, given the answers to it. `auto` takes the first that nobody refuses.

    Raises:
        ConfigError: a dispatcher that was asked for by name does not work; it is never replaced by another.
    """
    if name == "auto":
        refused = {}
        for candidate, reason in answers.items():
            if reason is None:
                return Choice(candidate, refused)
            refused[candidate] = reason
        raise AssertionError(f"{FALLBACK} refuses nothing")
    if answers[name] is not None:
        raise ConfigError(f"ep_dispatcher {name} cannot be used here: {answers[name]} `auto` takes what works.")
    return Choice(name, {})


def agree(answers: Answers) -> dict[str, str | None]:
    """The answers of all ranks of the job as one; a reason that not all of them have names its ranks. Collective."""
    of_ranks = gather(answers)
    return {name: _joined([of_rank[name] for of_rank in of_ranks]) for name in answers}


def _joined(reasons: Sequence[str | None]) -> str | None:
    """One reason for all, out of one a rank."""
    if len(set(reasons)) == 1:
        return reasons[0]
    ranks: dict[str, list[str]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            ranks.setdefault(reason, []).append(str(rank))
    return " ".join(f"on rank {some(those)}: {reason}" for reason, those in ranks.items())


def build_dispatcher(name: str, ep_mesh: DeviceMesh, situation: Situation) -> TokenDispatcher:
    """The dispatcher for all experts modules with the same situation. Collective over all ranks of the job.

    Logs, once, what `auto` came to.

    Args:
        name: `auto` or one of `TRANSPORTS`.
        ep_mesh: 1-D mesh of the EP group.
        situation: what it has to do.

    Raises:
        ConfigError: see `choose`; on every rank.
    """
    if ep_mesh.size() == 1:
        check_dispatcher(name)
        return LocalDispatcher(situation.num_experts)
    choice = choose(name, agree(ask(name, situation)))
    if name == "auto" and dist.get_rank() == 0:
        # On a CPU there is nothing better to be had; on an accelerator somebody will want to know.
        missed = choice.name == FALLBACK and situation.device.type != "cpu"
        logger.log(logging.WARNING if missed else logging.INFO, "%s: %s", describe(situation), choice)
    return TransportDispatcher(TRANSPORTS.find(choice.name)(ep_mesh, situation))


def describe(situation: Situation) -> str:
    """What a choice depends on, in a few words."""
    node = "on one node" if situation.is_inside_node else "across nodes"
    if situation.ranks_per_node is None:
        node = "on nobody knows how many nodes"
    dtype = str(situation.dtype).removeprefix("torch.") if situation.dtype is not None else "autocast's dtype"
    return (
        f"{situation.num_experts} experts on {situation.ep_size} ranks {node}, {situation.hidden} features in {dtype} "
        f"on {situation.device.type}, {situation.topology}"
    )
