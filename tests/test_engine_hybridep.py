"""HybridEP: its adapter against an emulation as strict as the engine, with seeded faults; what it refuses; signatures.

`ranks/engine_checks.py`, `ranks/engine_rows.py` and `ranks/engine_hybridep.py` say what is checked and what is seeded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from emulation import hybrid_ep as emulation
from emulation.install import installed
from emulation.signatures import differences, snapshot
from expertmesh_plugins.deepep import engine
from expertmesh_plugins.deepep.hybrid import HybridEP
from processes import TESTS, run_ranks

from expertmesh.dispatch.transport import Situation

SITUATION = Situation(
    ep_size=8, num_experts=128, hidden=2048, dtype=torch.bfloat16, device=torch.device("cpu"), ranks_per_node=8
)


@cache
def results(num_processes: int):
    """What was said on each rank: of scenarios, calls and faults."""
    rank_0, *_ = run_ranks(TESTS / "ranks" / "engine_hybridep.py", num_processes)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_processes", [2, 4])
def test_it_does_what_an_engine_has_to(num_processes):
    for rank in results(num_processes):
        if num_processes == 2:
            assert "it takes experts by fours, and these are 2" in rank["scenarios"].pop("one expert a rank")
        assert len(rank["scenarios"]) >= 6 and len(rank["calls"]) == 9
        assert not {name: said for kind in ("scenarios", "calls") for name, said in rank[kind].items() if said}


def test_seeded_faults_are_noticed():
    everybody = results(2)
    names = everybody[0]["faults"]
    assert len(names) == 18
    assert not [name for name in names if not any(rank["faults"][name] for rank in everybody)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=torch.device("cuda")), "needs cpu, and tokens are on cuda: use all_to_all"),
        (dict(dtype=torch.float32), r"tokens are torch.float32: set mixed_precision to bf16"),
        (dict(hidden=2056), "a hidden size that is a multiple of 16, and this is 2056: use all_to_all"),
        (dict(num_experts=6, ep_size=2), "takes experts by fours, and these are 6: use all_to_all"),
        (dict(num_experts=8320), "1024 experts a rank, and 1040 are: raise ep_size"),
        (dict(ep_size=16), "16 ranks goes beyond 8: lower ep_size, or set NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"),
    ],
)
def test_it_refuses_what_the_engine_cannot_do(change, reason):
    with installed("hybrid_ep"):
        assert HybridEP.refusal(SITUATION) is None
        assert reason in HybridEP.refusal(replace(SITUATION, **change))


def test_nvlink_may_reach_further_than_a_node(monkeypatch):
    with installed("hybrid_ep"):
        monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "72")
        assert HybridEP.refusal(replace(SITUATION, ep_size=24, num_experts=96)) is None
        assert "goes beyond 72" in HybridEP.refusal(replace(SITUATION, ep_size=16))


def test_another_build_of_deepep_is_refused():
    with installed("deep_ep_v1"):
        assert "has no HybridEPBuffer: install DeepEP's branch hybrid-ep" in HybridEP.refusal(SITUATION)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(emulation, "DEVICE_TYPES", ("cuda",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with installed("hybrid_ep"):
        reason = HybridEP.refusal(replace(SITUATION, device=torch.device("cuda")))
    assert reason == "it needs a GPU of Hopper's generation or newer, not NVIDIA A100: use all_to_all."


def test_the_emulation_is_called_as_the_sources_say():
    assert not differences(emulation, snapshot("hybrid_ep"), with_returns=True)


def test_the_installed_engine_is_called_as_the_sources_say():
    reason = engine.unavailable("HybridEPBuffer")
    if reason is not None:
        pytest.skip(reason)
    assert not differences(engine.load(), snapshot("hybrid_ep"), with_returns=False)
