"""The one expert-parallel group that Transformer Engine has in a process, and the buffers of the calls in flight.

The group is created for a number of tokens a rank. When more come it is created anew. What was sent before cannot be
brought back then, so that must not happen between a forward and its backward.

Transformer Engine tears the group down when the process ends, for which the process group must still live. Whoever
destroys that earlier calls `expertmesh.dispatch.close_engines` first, as the end of training under Accelerate does.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from expertmesh_plugins.transformer_engine.engine import load
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.capacity import Capacity
from expertmesh.dispatch.closing import close_with_training
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError

# One alignment a process. Without any, rows are exactly what arrived: there are no gaps.
ALIGNMENT = 0


@dataclass(frozen=True)
class Purpose:
    """What a group is created for, as far as it is known before the first token."""

    ep_size: int
    num_experts: int
    hidden: int

    @classmethod
    def of(cls, situation: Situation) -> Purpose:
        """Situations with the same purpose can share a group."""
        return cls(situation.ep_size, situation.num_experts, situation.hidden)

    def __str__(self) -> str:
        return f"{self.num_experts} experts on {self.ep_size} ranks with {self.hidden} features"


@dataclass(eq=False)
class Lease:
    """An `EpBuffer` for one call. It is free for another once nobody refers to the lease.

    Attributes:
        buffer: Transformer Engine's own.
        generation: which of the process's groups, one after another, it belongs to.
    """

    buffer: Any
    generation: int


class Session:
    """The process's group.

    Args:
        ep_mesh: its ranks.
        purpose: what it is for.
    """

    def __init__(self, ep_mesh: DeviceMesh, purpose: Purpose) -> None:
        self.ep_mesh = ep_mesh
        self.purpose = purpose
        self._engine = load()
        self._capacity = Capacity(ep_mesh)
        self._tokens = 0
        self._top_k = 0
        self._generation = 0
        self._free: list[Any] = []

    def lease(self, tokens: Tensor, top_k: int) -> Lease:
        """A buffer for a call. Collective.

        Args:
            tokens: `[tokens, hidden]`, what will be sent.
            top_k: experts of a token.

        Raises:
            ConfigError: the group serves another top-k.
        """
        self._reach(tokens, top_k)
        buffer = self._free.pop() if self._free else self._new_buffer(tokens)
        lease = Lease(buffer, self._generation)
        weakref.finalize(lease, self._take_back, buffer, lease.generation).atexit = False
        return lease

    def check(self, lease: Lease) -> None:
        """Refuse a lease from before the group was created anew.

        Raises:
            ConfigError: see the module's docstring.
        """
        if lease.generation != self._generation:
            raise ConfigError(
                f"a rank got more tokens than ever before ({self._tokens} at most, now) between a forward and its "
                f"backward, and Transformer Engine's buffers cannot grow there: let the largest batch be the first, or "
                f"set ep_dispatcher to another than te_ep."
            )

    def close(self) -> None:
        """Tear the group down. Collective."""
        self._engine.ep_finalize()
        self._free.clear()
        self._generation += 1

    def _reach(self, tokens: Tensor, top_k: int) -> None:
        """See to it that the group takes so many tokens."""
        capacity = self._capacity.at_least(tokens.shape[0])
        if top_k != self._top_k and self._tokens:
            raise ConfigError(
                f"Transformer Engine takes one top-k a process, and has {self._top_k}; now {top_k} experts a token "
                f"are asked for: set ep_dispatcher to another than te_ep."
            )
        if capacity <= self._tokens:
            return
        self.close()
        self._engine.ep_bootstrap(
            self.ep_mesh.get_group(),
            self.purpose.num_experts,
            capacity,
            self.purpose.hidden,
            top_k,
            max_token_dtype=tokens.dtype,
        )
        self._tokens, self._top_k = capacity, top_k

    def _new_buffer(self, tokens: Tensor) -> Any:
        return self._engine.EpBuffer(
            self._top_k,
            self._tokens,
            self.purpose.hidden,
            self.purpose.num_experts // self.purpose.ep_size,
            alignment=ALIGNMENT,
            device=tokens.device,
        )

    def _take_back(self, buffer: Any, generation: int) -> None:
        if generation == self._generation:
            self._free.append(buffer)


_SESSION: Session | None = None


def open_session(ep_mesh: DeviceMesh, situation: Situation) -> Session:
    """The process's session, claimed by the first who asks.

    Raises:
        ConfigError: it is claimed for something else.
    """
    global _SESSION
    reason = claimed(situation)
    if reason is None and _SESSION is not None and not _SESSION.ep_mesh.mesh.equal(ep_mesh.mesh):
        reason = f"it already serves the ranks {_SESSION.ep_mesh.mesh.tolist()} in this process: use all_to_all here."
    if reason is not None:
        raise ConfigError(f"ep_dispatcher te_ep cannot be used here: {reason}")
    if _SESSION is None:
        _SESSION = Session(ep_mesh, Purpose.of(situation))
        close_with_training(finalize)
    return _SESSION


def claimed(situation: Situation) -> str | None:
    """Why the process cannot have a group for a situation; None if it can."""
    purpose = Purpose.of(situation)
    if _SESSION is None and load().is_ep_bootstrapped():
        return "something else in this process uses Transformer Engine's EP, which exists once: use all_to_all here."
    if _SESSION is not None and _SESSION.purpose != purpose:
        return f"it exists once a process, and serves {_SESSION.purpose} already, not {purpose}: use all_to_all here."
    return None


def finalize() -> None:
    """Tear down what this process has of it. Collective; before `torch.distributed.destroy_process_group`."""
    global _SESSION
    if _SESSION is not None:
        _SESSION.close()
    _SESSION = None
