"""Putting an emulation where the real package would be imported from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# The names that are imported, and the module that emulates each; the first is what `installed` yields.
EMULATIONS = {
    "deep_ep_v1": {"deep_ep": "deep_ep_v1"},
    "deep_ep_v2": {"deep_ep": "deep_ep_v2"},
    "hybrid_ep": {"deep_ep": "hybrid_ep"},
    "te": {
        "transformer_engine": "te",
        "transformer_engine.common": "te",
        "transformer_engine.common.recipe": "te_recipe",
        "transformer_engine.pytorch": "te",
        "transformer_engine.pytorch.ep": "te_ep",
        "transformer_engine.pytorch.quantization": "te_quantization",
    },
}


@contextmanager
def installed(name: str) -> Iterator[ModuleType]:
    """While the block runs, the packages of an emulation are what is imported under their real names."""
    emulating = {real: importlib.import_module(f"emulation.{module}") for real, module in EMULATIONS[name].items()}
    before = {real: sys.modules.get(real) for real in emulating}
    sys.modules.update(emulating)
    try:
        yield next(iter(emulating.values()))
    finally:
        for real, module in before.items():
            if module is None:
                del sys.modules[real]
            else:
                sys.modules[real] = module
