"""Transformer Engine's EP: its adapter against an emulation as strict as the engine, with seeded faults; refusals; API.

`ranks/engine_checks.py`, `ranks/engine_rows.py` and `ranks/engine_te_ep.py` say what is checked and what is seeded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from emulation import te_ep as emulation
from emulation.install import installed
from emulation.signatures import differences, snapshot
from expertmesh_plugins.transformer_engine import TransformerEngineEP, engine
from processes import TESTS, run_ranks

from expertmesh.dispatch.transport import Situation

SITUATION = Situation(
    ep_size=8, num_experts=128, hidden=2048, dtype=torch.bfloat16, device=torch.device("cpu"), ranks_per_node=8
)


@cache
def results(num_processes: int):
    """What was said on each rank: of scenarios, calls and faults."""
    rank_0, *_ = run_ranks(TESTS / "ranks" / "engine_te_ep.py", num_processes)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_processes", [2, 4])
def test_it_does_what_an_engine_has_to(num_processes):
    for rank in results(num_processes):
        assert len(rank["scenarios"]) >= 7 and len(rank["calls"]) == 11
        assert not {name: said for kind in ("scenarios", "calls") for name, said in rank[kind].items() if said}


def test_seeded_faults_are_noticed():
    everybody = results(2)
    names = everybody[0]["faults"]
    assert len(names) == 16
    assert not [name for name in names if not any(rank["faults"][name] for rank in everybody)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device=torch.device("cuda")), "needs cpu, and tokens are on cuda: use all_to_all"),
        (dict(dtype=torch.float32), "tokens are torch.float32: set mixed_precision to bf16"),
        (dict(hidden=2044), "a hidden size that is a multiple of 8, and this is 2044: use all_to_all"),
        (dict(ep_size=1), "two ranks or more, and ep_size is 1: raise ep_size"),
    ],
)
def test_it_refuses_what_the_engine_cannot_do(change, reason):
    with installed("te"):
        assert TransformerEngineEP.refusal(SITUATION) is None
        assert reason in TransformerEngineEP.refusal(replace(SITUATION, **change))


def test_an_old_one_is_refused(monkeypatch):
    monkeypatch.setattr(emulation, "__version__", "2.18.1")
    with installed("te"):
        reason = TransformerEngineEP.refusal(SITUATION)
    assert reason.startswith("the installed transformer_engine is 2.18.1: install Transformer Engine 2.19 or newer")


def test_an_old_nccl_is_refused(monkeypatch):
    said = "NCCL EP requires NCCL >= 2.30.4 at runtime; found 2.29.7. Upgrade NCCL to a compatible version."
    monkeypatch.setattr(emulation, "NCCL_FAULT", said)
    with installed("te"):
        reason = TransformerEngineEP.refusal(SITUATION)
    assert reason.startswith(f"{said[:-1]}: install PyTorch 2.14 or newer, or `pip install")


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(emulation, "DEVICE_TYPES", ("cuda",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with installed("te"):
        reason = TransformerEngineEP.refusal(replace(SITUATION, device=torch.device("cuda")))
    assert reason == "it needs a GPU of Hopper's generation or newer, not NVIDIA A100: use all_to_all."


def test_the_emulation_is_called_as_the_sources_say():
    said = snapshot("te_ep_2.20.2")
    assert not differences(emulation, said, with_returns=True)
    assert operators() == said["operators"]


def test_the_installed_engine_is_called_as_the_sources_say():
    reason = engine.unavailable()
    if reason is not None:
        pytest.skip(reason)
    said = snapshot("te_ep_2.20.2")
    assert not differences(engine.load(), said, with_returns=False)
    assert operators() == said["operators"]


def operators() -> dict[str, str]:
    names = snapshot("te_ep_2.20.2")["operators"]
    return {name: str(getattr(torch.ops.transformer_engine_ep, name).default._schema) for name in names}
