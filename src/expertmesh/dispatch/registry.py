"""The transports that can be chosen by name: ours, and those that packages register.

A package offers one by an entry point in the group `expertmesh.dispatchers`, whose name is the value of `ep_dispatcher`
and which points at a `Transport` class.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.dispatch.transport import Situation, Transport
from expertmesh.errors import ConfigError

GROUP = "expertmesh.dispatchers"
FALLBACK = "all_to_all"


def transport_names() -> tuple[str, ...]:
    """All names, the one that always works first."""
    return (FALLBACK, *sorted({entry.name for entry in entry_points(group=GROUP)} - {FALLBACK}))


def find_transport(name: str) -> type[Transport]:
    """The class behind a name.

    Raises:
        ConfigError: nobody registered the name, or several packages did, or what is registered cannot be imported.
    """
    if name == FALLBACK:
        return AllToAll
    registered = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not registered:
        raise ConfigError(
            f"ep_dispatcher {name!r} is unknown: set ep_dispatcher to auto or one of {', '.join(transport_names())}."
        )
    if len(registered) > 1:
        raise ConfigError(
            f"ep_dispatcher {name!r} is registered more than once, as {' and as '.join(sorted(registered))}: "
            f"uninstall all of these packages but one."
        )
    (found,) = registered.values()
    try:
        return found.load()
    # Somebody else's package may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"ep_dispatcher {name!r} is registered as {found.value}, which cannot be imported "
            f"({type(error).__name__}: {error}): repair or remove that package, or choose another dispatcher."
        ) from error


def refusal(name: str, situation: Situation) -> str | None:
    """Why a dispatcher cannot serve a situation on this rank, with the remedy; None if it can.

    Never raises, whatever a package does: the other ranks are waiting for the answer.
    """
    try:
        return find_transport(name).refusal(situation)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"its check failed ({type(error).__name__}: {error}): report that to whoever wrote the dispatcher."
