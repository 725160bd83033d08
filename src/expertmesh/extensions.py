"""What a key of the configuration can name: ours, and what other packages register.

A package offers one by an entry point, whose group says which key it is for, whose name is the key's value, and which
points at a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from expertmesh.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Extensions(Generic[T]):
    """The choices of one key.

    Attributes:
        key: of the configuration.
        group: of entry points.
        ours: what needs no package, by name. Nobody can replace one of them.
    """

    key: str
    group: str
    ours: Mapping[str, type[T]]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, ours first. Nothing is imported."""
        return (*self.ours, *sorted({entry.name for entry in entry_points(group=self.group)} - self.ours.keys()))

    def check(self, name: str) -> None:
        """Refuse a name that nobody registered. What was registered is not imported.

        Raises:
            ConfigError: says which names there are.
        """
        if name not in ("auto", *self.names):
            raise ConfigError(
                f"{self.key} {name!r} is unknown: set {self.key} to auto or one of {', '.join(self.names)}."
            )

    def find(self, name: str) -> type[T]:
        """The class behind a name.

        Raises:
            ConfigError: nobody registered the name, or several packages did, or what is registered cannot be imported.
        """
        self.check(name)
        return self.ours[name] if name in self.ours else self._load(self._only(name))

    def _only(self, name: str) -> EntryPoint:
        registered = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        if len(registered) > 1:
            raise ConfigError(
                f"{self.key} {name!r} is registered more than once, as {' and as '.join(sorted(registered))}: "
                f"uninstall all of these packages but one."
            )
        (found,) = registered.values()
        return found

    def _load(self, entry: EntryPoint) -> type[T]:
        try:
            return entry.load()
        # Somebody else's package may fail in any way.
        except Exception as error:
            raise ConfigError(
                f"{self.key} {entry.name!r} is registered as {entry.value}, which cannot be imported "
                f"({type(error).__name__}: {error}): repair or remove that package, or set {self.key} to another one."
            ) from error
