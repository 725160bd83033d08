"""Engines that are there, that are not, and that fail when they are imported, in each way in which the real ones do."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from fake_packages import FAILURES
from processes import TESTS, run_ranks

from expertmesh import doctor
from expertmesh.dispatch import select
from expertmesh.dispatch.registry import refusal
from expertmesh.dispatch.topology import Topology
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError

SITUATION = Situation(
    ep_size=8,
    num_experts=128,
    hidden=2048,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    ranks_per_node=8,
    topology=Topology("nvlink", True),
)
PACKAGES = {
    "deepep": "deep_ep",
    "deepep_expanded": "deep_ep",
    "hybridep": "deep_ep",
    "te_ep": "transformer_engine",
}
REMEDIES = {
    "deepep": "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP",
    "deepep_expanded": "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP",
    "hybridep": "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep",
    "te_ep": "pip install --no-build-isolation",
}
EMULATIONS = {"deep_ep_v1": "deepep", "deep_ep_v2": "deepep", "hybrid_ep": "hybridep", "te": "te_ep"}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of installed packages; what was imported of the engines before is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES.values():
            monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("kind", FAILURES)
def test_an_engine_that_fails_to_import_is_refused_with_its_error(site, kind):
    for package in set(PACKAGES.values()):
        (site / f"{package}.py").write_text(FAILURES[kind])
    for name in PACKAGES:
        assert kind in refusal(name, SITUATION)
        with pytest.raises(ConfigError, match=f"^ep_dispatcher {name} cannot be used here: .*{kind}"):
            select.choose(name, select.ask(name, SITUATION))
    choice = select.choose("auto", select.ask("auto", SITUATION))
    assert choice.name == "all_to_all"
    assert list(choice.refused) == ["deepep", "hybridep", "te_ep"]
    assert all(kind in reason for reason in choice.refused.values())


def test_doctor_prints_the_remedy_for_each_engine_that_is_not_there(site):
    lines = {" ".join(str(finding).split()[1:3]): str(finding) for finding in doctor.dispatchers()}
    for name, remedy in REMEDIES.items():
        assert lines[f"dispatcher {name}"].startswith("--") and remedy in lines[f"dispatcher {name}"]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    (site / "deep_ep.py").write_text(FAILURES["AssertionError"])
    (site / "transformer_engine.py").write_text(FAILURES["RuntimeError"])
    path = os.pathsep.join((str(site), str(TESTS)))
    ranks = run_ranks(TESTS / "ranks" / "engine_choice.py", 2, env={"PYTHONPATH": path})
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


def test_all_ranks_choose_alike(on_ranks):
    assert on_ranks[0] == on_ranks[1]


@pytest.mark.parametrize("emulation", EMULATIONS)
def test_auto_takes_what_is_installed_and_works(on_ranks, emulation):
    chosen = on_ranks[0][f"{emulation} on all"]
    assert chosen.pop("auto") == EMULATIONS[emulation]
    assert all(name == outcome for name, outcome in chosen.items())


@pytest.mark.parametrize("emulation", EMULATIONS)
def test_what_works_on_one_rank_only_is_refused_on_all(on_ranks, emulation):
    chosen = on_ranks[0][f"{emulation} on rank 0"]
    assert chosen.pop("auto") == "all_to_all"
    for name, outcome in chosen.items():
        assert outcome.startswith(f"ep_dispatcher {name} cannot be used here: on rank 1: ")
