"""The transports that can be chosen by name: ours, and those that packages register.

A package offers one by an entry point in the group `expertmesh.dispatchers`, whose name is the value of `ep_dispatcher`
and which points at a `Transport` class.
"""

from __future__ import annotations

from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.dispatch.transport import Situation, Transport
from expertmesh.errors import ConfigError
from expertmesh.extensions import Extensions

FALLBACK = "all_to_all"
TRANSPORTS: Extensions[Transport] = Extensions("ep_dispatcher", "expertmesh.dispatchers", {FALLBACK: AllToAll})


def refusal(name: str, situation: Situation) -> str | None:
    """Why a dispatcher cannot serve a situation on this rank, with the remedy; None if it can.

    Never raises, whatever a package does: the other ranks are waiting for the answer.
    """
    try:
        return TRANSPORTS.find(name).refusal(situation)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"its check failed ({type(error).__name__}: {error}): report that to whoever wrote the dispatcher."
