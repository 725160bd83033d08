"""Finding engine adapters without importing them: the entry-point group `expertmesh.plugins`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from expertmesh.errors import ConfigError

GROUP = "expertmesh.plugins"


def load_plugin(name: str) -> ModuleType:
    """Import the adapter that some installed package registered under `name`.

    Raises:
        ConfigError: nobody did.
    """
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"no plugin named {name!r} is installed (installed: {known}): reinstall expertmesh.")
    return import_module(found[name])
