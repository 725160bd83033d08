"""A DeepEP adapter against its emulation, on ranks: run by `test_engines.py`; rank 0 prints one JSON object.

    python engines.py <engine>

Every scenario, then seeded faults: each breaks the adapter in one place, and some check has to notice; then what only
shows over several calls.
"""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

from engine_checks import Engine, put_to_the_test
from engine_events import CALLED
from engine_faults import FAULTS
from expertmesh_plugins.deepep import DeepEP, DeepEPExpanded, buffers

_apart = partial(patch.dict, buffers._BUFFERS, clear=True)
ENGINES = {
    "deepep_v1": Engine("deep_ep_v1", DeepEP, 128, apart=_apart),
    "deepep_v2": Engine("deep_ep_v2", DeepEP, 256, apart=_apart),
    "deepep_v2_expanded": Engine("deep_ep_v2", DeepEPExpanded, 256, apart=_apart),
}

if __name__ == "__main__":
    put_to_the_test(ENGINES[sys.argv[1]], CALLED, FAULTS[sys.argv[1]])
