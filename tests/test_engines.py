"""The adapters of the engines that need a GPU, against emulations that are as strict as the engines, and seeded faults.

`ranks/engines.py` says what is checked, `ranks/engine_faults.py` what is seeded. In float32 everything equals
arithmetic that moves nothing to 2e-6 of the largest entry, in bfloat16 to 0.03.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from processes import TESTS, run_ranks

ENGINES = ("deepep_v1", "deepep_v2", "deepep_v2_expanded")
SCENARIOS = (
    "uneven",
    "a rank without tokens",
    "no tokens at all",
    "a rank that receives none",
    "all to one expert",
    "one expert a rank",
    "more choices than local experts",
)


@cache
def results(engine: str, num_processes: int):
    """What was said on each rank."""
    rank_0, *_ = run_ranks(TESTS / "ranks" / "engines.py", num_processes, engine)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_does_what_it_has_to(engine, num_processes):
    for rank in results(engine, num_processes):
        assert tuple(rank["scenarios"]) == SCENARIOS
        assert not {name: said for name, said in rank["scenarios"].items() if said}


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_calls_share_a_route_a_buffer_and_the_time(engine, num_processes):
    for rank in results(engine, num_processes):
        assert len(rank["calls"]) == 7
        assert not {name: said for name, said in rank["calls"].items() if said}


@pytest.mark.parametrize("engine", ENGINES)
def test_seeded_faults_are_noticed(engine):
    everybody = results(engine, 2)
    assert len(everybody[0]["faults"]) >= 6
    unnoticed = [name for name in everybody[0]["faults"] if not any(rank["faults"][name] for rank in everybody)]
    assert not unnoticed
