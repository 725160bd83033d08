"""Doing something to a module right after it was imported, whoever imports it and whenever.

Nothing but the standard library is imported here: this file is loaded while `import torch` is still running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once the module's code has run: now, if it has, or as soon as somebody imports it.

    A callback that raises is reported on stderr, and the import succeeds.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_running(module):
        _call(callback, module)
    else:
        sys.meta_path.insert(0, AfterImport(name, callback))


class AfterImport(MetaPathFinder):
    """Finds one module as usual, and calls `callback(module)` once its code has run; then it does nothing any more.

    A module whose code is running already, because it is what imports PyTorch, is looked after at the next import.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching = False
        self._waiting = name in sys.modules

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other finders' answer, with a loader that calls back; `None` for every other module."""
        if self._waiting:
            self._look_after(sys.modules[self._name])
        if name != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(name)
        finally:
            self._searching = False
        if spec is not None:
            self._wrap(spec.loader)
        return spec

    def _look_after(self, module: ModuleType) -> None:
        if not _is_running(module):
            # It stays among the finders, which are being gone through at this moment.
            self._waiting = False
            _call(self._callback, module)

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _call(self._callback, module)

        loader.exec_module = exec_module


def _is_running(module: ModuleType) -> bool:
    return module.__spec__ is not None and module.__spec__._initializing


def _call(callback: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:
        print(
            f"expertmesh: what it adds to {module.__name__} is missing, its import hook failed "
            f"({type(error).__name__}: {error}): reinstall expertmesh.",
            file=sys.stderr,
        )
