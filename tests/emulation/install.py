"""Putting an emulation where the real package would be imported from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# The emulating module, and the names it is imported by.
EMULATIONS = {
    "deep_ep_v1": ("emulation.deep_ep_v1", ("deep_ep",)),
    "deep_ep_v2": ("emulation.deep_ep_v2", ("deep_ep",)),
    "hybrid_ep": ("emulation.hybrid_ep", ("deep_ep",)),
    "te": ("emulation.te_ep", ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ep")),
}


@contextmanager
def installed(name: str) -> Iterator[ModuleType]:
    """While the block runs, the packages of an emulation are what is imported under their real names."""
    source, names = EMULATIONS[name]
    emulation = importlib.import_module(source)
    before = {each: sys.modules.get(each) for each in names}
    sys.modules.update(dict.fromkeys(names, emulation))
    try:
        yield emulation
    finally:
        for each, module in before.items():
            if module is None:
                del sys.modules[each]
            else:
                sys.modules[each] = module
