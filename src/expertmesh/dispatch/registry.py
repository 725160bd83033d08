"""The transports that can be chosen by name: ours, and those that packages register.

A package offers one by an entry point in the group `expertmesh.dispatchers`, whose name is the value of `ep_dispatcher`
and which points at a `Transport` class.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.dispatch.transport import Transport
from expertmesh.errors import ConfigError

GROUP = "expertmesh.dispatchers"
FALLBACK = "all_to_all"


def transport_names() -> tuple[str, ...]:
    """All names, the one that always works first."""
    return (FALLBACK, *sorted(_registered()))


def find_transport(name: str) -> type[Transport]:
    """The class behind a name.

    Raises:
        ConfigError: nobody registered the name, or what is registered cannot be imported.
    """
    if name == FALLBACK:
        return AllToAll
    found = _registered().get(name)
    if found is None:
        raise ConfigError(
            f"ep_dispatcher {name!r} is unknown: set ep_dispatcher to auto or one of {', '.join(transport_names())}."
        )
    try:
        return found.load()
    # Somebody else's package may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"ep_dispatcher {name!r} is registered as {found.value}, which cannot be imported "
            f"({type(error).__name__}: {error}): repair or remove that package, or choose another dispatcher."
        ) from error


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
