"""Transformers' own expert parallelism with our dispatchers: `DistributedConfig(ep_implementation=...)`.

The oracle is one process, and Transformers' own implementation is a second. Tolerances are relative to a tensor's
largest entry: sums are taken in another order, nothing else differs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys

import pytest
from fake_packages import FAILURES, install, only_on_rank_1
from processes import TESTS, run_command, run_ranks
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    EpDispatchExpertsParallel,
    EPImplementation,
    EPImplementationInterface,
)

from expertmesh.dispatch.registry import TRANSPORTS

EXACT = 1e-5
NAMES = """
import sys
{first}
{second}
assert not any(name.startswith("expertmesh.dispatch") for name in sys.modules), "more was imported than is needed"
from transformers.distributed.expert_parallel import EPImplementationInterface
print(*EPImplementationInterface())
"""


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    program, folder = TESTS / "ranks" / "ep_implementation.py", tmp_path_factory.mktemp("models")
    site = tmp_path_factory.mktemp("site")
    install(site, "halfway", only_on_rank_1(FAILURES["AssertionError"]))
    rank_0, *_ = run_ranks(
        program, request.param, folder, env={"PYTHONPATH": os.pathsep.join((str(site), str(TESTS)))}, timeout=240
    )
    return json.loads(rank_0.stdout.splitlines()[-1])


def test_losses_and_gradients_equal_one_process_and_transformers_own(results):
    beyond = {
        f"{case} {between}": error
        for case, errors in results.items()
        for between, error in errors.items()
        if not error <= EXACT
    }
    assert len(results) >= 5 and not beyond


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import transformers.distributed.expert_parallel", "import expertmesh"),
        ("import expertmesh", "from transformers import Trainer"),
    ],
)
def test_the_names_are_there_whatever_is_imported_first(first, second):
    finished = run_command([sys.executable, "-c", NAMES.format(first=first, second=second)])
    assert finished.returncode == 0 and not finished.stderr, finished.output
    ours = {"expertmesh", "expertmesh_all_to_all", *TRANSPORTS.names} | {"auto", "all_reduce", "deepgemm_megamoe"}
    assert set(finished.stdout.split()) == ours


def test_a_name_of_transformers_keeps_its_meaning():
    assert EPImplementationInterface()["all_to_all"] is AllToAllEP
    assert EPImplementationInterface()["expertmesh_all_to_all"].args == ("all_to_all",)
    assert EPImplementationInterface()["expertmesh"].args == ("auto",)


def test_what_transformers_promises_an_implementation_is_what_we_rely_on():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(EPImplementation.__init__) == ["self", "experts", "ep_mesh", "tp_mesh"]
    assert names(EPImplementation.__call__) == ["self", "hidden_states", "top_k_index", "top_k_weights"]
    assert names(EPImplementationInterface.register) == ["key", "value"]
    style = EpDispatchExpertsParallel.install_forward
    assert names(style) == ["self", "module", "ep_mesh", "tp_mesh", "ep_implementation"]
    assert "implementations[ep_implementation](module, ep_mesh, tp_mesh)" in inspect.getsource(style)
    assert "implementation(hidden_states, top_k_index, top_k_weights)" in inspect.getsource(style)
    assert EpDispatchExpertsParallel().should_use_local_tensors(None)
    # Ranks of a TP group hold the same batch, and take the slices that `Shard(0)` gives them.
    assert "[Replicate()], run_check=False" in inspect.getsource(AllToAllEP._dispatch_tokens)
    assert ".redistribute(self.tp_mesh, [Shard(0)])" in inspect.getsource(AllToAllEP._dispatch_tokens)
    assert {"ep_size", "fsdp_size", "tp_size", "dp_replicate_size", "ep_implementation"} <= set(
        inspect.signature(DistributedConfig).parameters
    )
