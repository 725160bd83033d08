"""The adapters of the engines that need a GPU, against emulations that are as strict as the engines, and seeded faults.

`ranks/engine_checks.py` and `ranks/engine_events.py` say what is checked, `ranks/engine_faults.py` what is seeded. In
float32 everything equals arithmetic that moves nothing to 2e-6 of the largest entry, in bfloat16 to 0.03.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from emulation.install import installed
from emulation.signatures import differences, snapshot
from expertmesh_plugins.deepep import DeepEP, engine
from expertmesh_plugins.deepep.v1 import DeepEPV1
from expertmesh_plugins.deepep.v2 import DeepEPV2
from processes import TESTS, run_ranks

from expertmesh.dispatch.transport import Situation

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
        assert len(rank["calls"]) == 10
        assert not {name: said for name, said in rank["calls"].items() if said}


@pytest.mark.parametrize("engine", ENGINES)
def test_seeded_faults_are_noticed(engine):
    everybody = results(engine, 2)
    assert len(everybody[0]["faults"]) >= 15
    said = {name: [rank["faults"][name] or "" for rank in everybody] for name in everybody[0]["faults"]}
    # A rank that waited in vain noticed nothing: the other one did, or else it may just have been slow.
    unnoticed = [name for name, each in said.items() if all(not one or "Timed out" in one for one in each)]
    assert not unnoticed


SITUATION = Situation(
    ep_size=8, num_experts=128, hidden=2048, dtype=torch.bfloat16, device=torch.device("cpu"), ranks_per_node=8
)
BOTH = [
    (dict(device=torch.device("cuda")), "needs cpu, and tokens are on cuda: use all_to_all"),
    (dict(dtype=torch.float32), "tokens are torch.float32: set mixed_precision to bf16"),
]
V1 = [
    *BOTH,
    (dict(ep_size=16, num_experts=16 * 1025), "takes 1024 experts a rank, and 1025 are: raise ep_size"),
    (dict(num_experts=8 * 129), "takes 128 experts a rank, and 129 are: raise ep_size"),
    (dict(hidden=2880), "a multiple of 128, and this is 2880: choose another dispatcher"),
    (dict(hidden=8192), "up to 8184 .* and this is 8192: choose another dispatcher"),
    (dict(ep_size=16, hidden=8160), "up to 8144 .* and this is 8160: choose another dispatcher"),
    (dict(ep_size=6), r"no kernels for an ep_size of 6: set ep_size to one of \(2, 4, 8\)"),
    (dict(ranks_per_node=4), "group of 8 is on several, with 4 each: choose an ep_size that divides 4"),
    (dict(ep_size=16, ranks_per_node=4), "takes 8 ranks of each, and a node has 4: use all_to_all"),
]
V2 = [
    *BOTH,
    (dict(hidden=2880), "a multiple of 256, and this is 2880: use all_to_all"),
    (dict(num_experts=8 * 121), "may be 128 together, and these are 129: raise ep_size"),
]


@pytest.mark.parametrize(
    ("emulation", "kind", "change", "reason"),
    [("deep_ep_v1", DeepEPV1, *case) for case in V1] + [("deep_ep_v2", DeepEPV2, *case) for case in V2],
)
def test_what_an_engine_cannot_do_is_refused_with_a_remedy(emulation, kind, change, reason):
    with installed(emulation):
        assert kind.refusal(SITUATION) is None
        assert DeepEP.refusal(SITUATION) is None
        said = kind.refusal(replace(SITUATION, **change))
    assert said is not None and re.search(reason, said), said


@pytest.mark.parametrize(
    ("for_hopper", "change", "reason"),
    [
        (True, {}, "built for GPUs of compute capability 9.0 .*: build it with DISABLE_SM90_FEATURES=1"),
        (False, dict(ep_size=16), "built with DISABLE_SM90_FEATURES it reaches 8 ranks: .* lower ep_size"),
        (False, {}, None),
    ],
)
def test_v1_on_an_older_gpu_is_refused_unless_it_was_built_for_it(monkeypatch, for_hopper, change, reason):
    with installed("deep_ep_v1") as emulation:
        monkeypatch.setattr(emulation, "DEVICE_TYPES", ("cuda",))
        monkeypatch.setattr(emulation.Buffer, "is_sm90_compiled", lambda: for_hopper)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        said = DeepEPV1.refusal(replace(SITUATION, device=torch.device("cuda"), **change))
    assert said is None if reason is None else re.search(reason, said), said


def test_memory_that_determinism_fills_is_refused():
    with installed("deep_ep_v2"), patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        assert "set torch.utils.deterministic.fill_uninitialized_memory to False" in DeepEPV2.refusal(SITUATION)


def test_the_installed_build_is_the_one_that_is_meant():
    with installed("deep_ep_v1"):
        assert "has no ElasticBuffer: install DeepEP 2.1.0 or newer" in DeepEPV2.refusal(SITUATION)
    with installed("deep_ep_v2"):
        assert "has no Buffer: install DeepEP 1.2.1 or newer" in DeepEPV1.refusal(SITUATION)


# The classes' signatures were read from the sources at these commits.
SNAPSHOTS = {"deep_ep_1.2.1": "deep_ep_v1", "deep_ep_2.1.0": "deep_ep_v2"}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_emulation_is_called_like_the_engine(name):
    module = importlib.import_module(f"emulation.{SNAPSHOTS[name]}")
    assert differences(module, snapshot(name), with_returns=False) == []


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_installed_engine_is_called_as_it_was(name):
    said = snapshot(name)
    if any(engine.unavailable(entry) for entry in said["classes"] if entry != "EventOverlap"):
        pytest.skip(f"DeepEP {said['version']} is not installed: {engine.unavailable(next(iter(said['classes'])))}")
    assert differences(engine.load(), said, with_returns=False) == []
