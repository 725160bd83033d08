"""Which dispatcher is taken: what works on every rank, or what was asked for and nothing else.

Packages that work, that work on one rank, or on none, are written to a folder on `sys.path`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from fake_packages import FAILURES, WORKS, install, only_on_rank_1
from processes import ROOT, TESTS, run_command, run_ranks

from expertmesh import doctor
from expertmesh.dispatch import check_dispatcher, select
from expertmesh.dispatch.registry import TRANSPORTS, refusal
from expertmesh.dispatch.topology import Topology, _link, _rdma
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import CONFIG_EXIT_CODE, ConfigError

SITUATION = Situation(
    ep_size=8,
    num_experts=128,
    hidden=2048,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    ranks_per_node=8,
    topology=Topology("nvlink", True),
)
REFUSES = """
import os
from expertmesh.dispatch.all_to_all import AllToAll

class Engine(AllToAll):
    @classmethod
    def refusal(cls, situation):
        return "needs rank 0: use that." if os.environ.get("RANK") != "0" else None
"""
CHECK_FAILS = """
from expertmesh.dispatch.all_to_all import AllToAll

class Engine(AllToAll):
    @classmethod
    def refusal(cls, situation):
        return 1 // 0
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", FAILURES)
def test_a_package_that_cannot_be_imported_is_a_reason(site, kind, monkeypatch):
    name = f"broken_{kind.lower()}"
    install(site, name, FAILURES[kind])
    check_dispatcher(name)
    answers = select.ask(name, SITUATION)
    assert f"cannot be imported ({kind}: " in answers[name]
    with pytest.raises(ConfigError, match=f"^ep_dispatcher {name} cannot be used here: .* `auto` takes what works"):
        select.choose(name, answers)
    monkeypatch.setattr(select, "PREFERENCE", (name, "all_to_all"))
    choice = select.choose("auto", select.ask("auto", SITUATION))
    assert choice.name == "all_to_all" and f"{name} was not chosen: " in str(choice) and kind in str(choice)


def test_auto_takes_the_first_that_nobody_refuses():
    answers = {"first": "is broken.", "second": None, "third": "is slow.", "all_to_all": None}
    assert select.choose("auto", answers) == select.Choice("second", {"first": "is broken."})


@pytest.mark.parametrize(
    ("ranks_per_node", "topology", "expected"),
    [
        (8, Topology("nvlink", True), None),
        (8, Topology("nvlink", False), None),
        (8, Topology("pcie", True), "not all GPUs of this machine are joined by NVLink"),
        (8, Topology("unknown", None), None),
        (None, Topology("nvlink", None), None),
        (4, Topology("nvlink", True), None),
        (4, Topology("pcie", True), None),
        (4, Topology("nvlink", None), None),
        (4, Topology("nvlink", False), "no RDMA card that is up: set ep_size to at most 4"),
    ],
)
def test_auto_looks_at_the_way_between_the_ranks(site, monkeypatch, ranks_per_node, topology, expected):
    install(site, "fused", WORKS)
    monkeypatch.setattr(select, "PREFERENCE", ("fused", "all_to_all"))
    situation = replace(SITUATION, ranks_per_node=ranks_per_node, topology=topology)
    choice = select.choose("auto", select.ask("auto", situation))
    assert choice.name == ("fused" if expected is None else "all_to_all")
    assert expected is None or expected in choice.refused["fused"]
    assert select.choose("fused", select.ask("fused", situation)).name == "fused", "by name it is used all the same"


def test_a_check_that_fails_is_a_reason(site):
    install(site, "careless", CHECK_FAILS)
    assert "its check failed (ZeroDivisionError: " in refusal("careless", SITUATION)


def test_two_packages_with_one_name_are_refused(site):
    for package in ("one", "other"):
        install(site, "twice", WORKS, package)
    assert "registered more than once, as one:Engine and as other:Engine" in refusal("twice", SITUATION)


def test_all_to_all_cannot_be_taken_over(site):
    install(site, "all_to_all", CHECK_FAILS)
    assert TRANSPORTS.names.count("all_to_all") == 1
    assert refusal("all_to_all", SITUATION) is None


def test_doctor_shows_what_is_refused_and_why(site):
    install(site, "wrecked", FAILURES["OSError"])
    lines = [str(finding) for finding in doctor.dispatchers()]
    assert any(line.startswith("--   dispatcher wrecked ") and "undefined symbol" in line for line in lines)
    assert any(line.startswith("ok   situation ") and "128 experts on 2 ranks on one node" in line for line in lines)
    assert any(line.split() == ["ok", "dispatcher", "auto", "all_to_all"] for line in lines)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """What each of 2 ranks chooses, where some packages do not work on the second."""
    site = tmp_path_factory.mktemp("site")
    sources = {kind.lower(): only_on_rank_1(source) for kind, source in FAILURES.items() if kind != "SyntaxError"}
    sources |= {"works": WORKS, "refuses": REFUSES}
    for name, source in sources.items():
        install(site, name, source)
    program = TESTS / "ranks" / "dispatcher_choice.py"
    ranks = run_ranks(program, 2, *sources, env={"PYTHONPATH": str(site)})
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


def test_a_rank_on_which_it_fails_is_named_and_all_ranks_refuse(on_ranks):
    first, second = on_ranks
    for kind in FAILURES.keys() - {"SyntaxError"}:
        name = kind.lower()
        assert first[name] == second[name]
        assert "cannot be used here: on rank 1: " in first[name]["refused"] and kind in first[name]["refused"]
    assert "on rank 1: needs rank 0: use that. `auto` takes what works." in first["refuses"]["refused"]
    assert first["refuses"] == second["refuses"]
    assert first["works"] == second["works"] == {"built": "Engine", "logged": ""}


def test_auto_takes_the_same_on_every_rank_and_logs_one_line(on_ranks):
    first, second = on_ranks
    for case, outcome in first.items():
        if not case.startswith("auto"):
            continue
        works = "works" in case
        assert outcome["built"] == second[case]["built"] == ("Engine" if works else "AllToAll")
        (line,) = outcome["logged"].splitlines()
        assert second[case]["logged"] == ""
        assert "8 experts on 2 ranks on one node, 16 features in float32 on cpu" in line
        assert ("was not chosen: on rank 1: " in line) is not works


def test_a_launched_job_is_refused_once_and_before_weights_are_touched(tmp_path):
    install(tmp_path, "halfway", only_on_rank_1(FAILURES["RuntimeError"]))
    launch = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    config = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml", "--parallelism_config_ep_dispatcher", "halfway")
    script = TESTS / "scripts" / "untouched.py"
    env = {"PYTHONPATH": str(tmp_path)}
    finished = run_command((*launch, *config, script), env=env, cwd=tmp_path, timeout=120)
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("expertmesh: ")]
    assert "ep_dispatcher halfway cannot be used here: on rank 1: " in line and "Found empty meta package" in line
    assert "Traceback" not in finished.output
    assert finished.stdout.count("untouched") == 2, finished.output


class Nvml:
    """NVML with some pairs of GPUs joined by NVLink; what it writes through pointers, and its status codes."""

    def __init__(self, joined: set[tuple[str, str]], broken: str = "") -> None:
        self.joined, self.broken, self.open = joined, broken, 0
        self.names: list[str] = []

    def _status(self, name: str) -> int:
        return 1 if name == self.broken else 0

    def nvmlInit_v2(self):
        self.open += 1
        return self._status("init")

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.names.append(name.decode())
        handle._obj.value = len(self.names)
        return self._status("handle")

    def nvmlDeviceGetP2PStatus(self, one, other, kind, status):
        assert kind == 2
        pair = (self.names[one.value - 1], self.names[other.value - 1])
        status._obj.value = 0 if pair in self.joined else 5
        return self._status("pair")


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (Nvml({("a", "b"), ("a", "c"), ("b", "c")}), "nvlink"),
        (Nvml({("a", "b")}), "pcie"),
        (Nvml(set(), broken="handle"), "unknown"),
        (Nvml(set(), broken="pair"), "unknown"),
        (None, "unknown"),
    ],
)
def test_the_link_is_nvlink_only_if_it_joins_every_pair(nvml, expected):
    assert _link(nvml, ["a", "b", "c"]) == expected
    assert nvml is None or nvml.open == 0


def test_one_gpu_has_no_link_and_a_driver_that_does_not_start_tells_nothing():
    assert _link(Nvml(set()), ["a"]) == "unknown"
    assert _link(Nvml({("a", "b")}, broken="init"), ["a", "b"]) == "unknown"


def test_rdma_needs_a_port_that_is_up_and_its_device_file(tmp_path):
    cards, doors = tmp_path / "cards", tmp_path / "doors"
    assert _rdma(cards, doors) is False
    port = cards / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    doors.mkdir()
    (port / "state").write_text("1: DOWN\n")
    (doors / "uverbs0").touch()
    assert _rdma(cards, doors) is False
    (port / "state").write_text("4: ACTIVE\n")
    assert _rdma(cards, doors) is True
    (doors / "uverbs0").unlink()
    assert _rdma(cards, doors) is False


def test_what_nobody_knows_is_called_unknown():
    assert str(Topology()) == "link between accelerators unknown, RDMA unknown"
    unknown = Situation(ep_size=8, num_experts=8, hidden=16, dtype=None, device=torch.device("cuda"))
    assert "on nobody knows how many nodes, 16 features in autocast's dtype on cuda" in select.describe(unknown)
    assert "8 ranks on one node" in select.describe(SITUATION)
