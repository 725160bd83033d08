"""Balanced over all ranks is balanced over the global batch: everything equals one process's.

The ranks run all cases in one go (`ranks/balance.py`), against Transformers' own auxiliary loss and against a z-loss, a
bias update and counts written out there. Tolerances are those of `test_parity.py`.
"""

from __future__ import annotations

import gc
import json
import weakref
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from expertmesh_plugins.transformers.balance import replace_balancing_loss, router_logits
from peft import LoraConfig, get_peft_model
from processes import TESTS, run_ranks
from ranks.families import build_family
from ranks.models import batches, build

from expertmesh.balance import balance
from expertmesh.balance.aux_loss import computes_the_same
from expertmesh.balance.bias import BiasUpdate
from expertmesh.balance.z_loss import RouterZLoss
from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ModelError

ENVIRONMENT = {"PYTHONPATH": str(TESTS)}
EXACT = {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5, "bias": 1e-8, "load": 0.0}
MESHES = [f"{mechanism}-{mesh}" for mechanism in ("aux", "z", "bias") for mesh in ("ep", "efsdp")]
CASES = {
    2: [
        *MESHES,
        *(f"{mechanism}-accumulation" for mechanism in ("aux", "z", "bias")),
        *(f"z-{kind}" for kind in ("full", "selective", "reentrant", "not-reentrant")),
        *(f"bias-{kind}" for kind in ("full", "selective", "reentrant", "not-reentrant")),
        *("aux-padded", "aux-full", "aux-not-reentrant"),
        *(f"family-{name}" for name in ("qwen2_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe")),
        *(f"family-{name}" for name in ("deepseek_v3", "glm4_moe", "nemotron_h", "lfm2_moe", "minimax_m2")),
        *(f"family-{name}" for name in ("laguna", "ernie4_5_moe")),
    ],
    4: [*MESHES, "everything", "everything-replicas", "bias-everything"],
}


@cache
def results(num_processes: int) -> dict[str, dict[str, float]]:
    rank_0, *_ = run_ranks(TESTS / "ranks" / "balance.py", num_processes, env=ENVIRONMENT, timeout=300)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize(("num_processes", "case"), [(size, case) for size, cases in CASES.items() for case in cases])
def test_balanced_ranks_equal_one_balanced_process(num_processes, case):
    beyond = {name: value for name, value in results(num_processes)[case].items() if not value <= EXACT[name]}
    assert not beyond, f"beyond {EXACT}: {beyond}"


@pytest.mark.parametrize(
    ("fault", "shows_in"),
    [
        ("local-aux", {"loss": 1e-3, "gradient": 0.5}),
        ("aux-gradient", {"gradient": 0.5}),
        ("z-gradient", {"gradient": 0.3}),
        ("counted-twice", {"load": 0.5}),
        ("local-load", {"bias": 0.005}),
    ],
)
def test_seeded_faults_are_caught(fault, shows_in):
    case = results(2)[f"fault-{fault}"]
    assert all(case[name] > at_least for name, at_least in shows_in.items()), case


def test_no_case_is_left_out():
    for num_processes, cases in CASES.items():
        assert {name for name in results(num_processes) if not name.startswith("fault-")} == set(cases)


# Who computes the loss.


@cache
def scripts(num_processes: int) -> dict[str, list[list[float]]]:
    rank_0, *_ = run_ranks(TESTS / "ranks" / "balanced_scripts.py", num_processes, env=ENVIRONMENT)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", ["trainer", "trainer-of-means", "trl", "by-hand"])
def test_losses_and_norms_of_a_script_do_not_depend_on_the_number_of_ranks(script):
    for one, two in zip(scripts(1)[script], scripts(2)[script], strict=True):
        assert two == pytest.approx(one, rel=1e-5)


# The auxiliary loss of Transformers' models.


def test_which_families_have_the_loss_that_is_taken_over_all_ranks():
    own_kind = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if "def load_balancing_loss_func" in path.read_text():
            module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            if not computes_the_same(module.load_balancing_loss_func):
                own_kind.add(path.parent.name)
    # Neither has experts that expert parallelism could spread.
    assert own_kind == {"doge", "switch_transformers"}


@pytest.fixture
def restored(monkeypatch):
    """Takes the replacement back after the test."""
    for name in ("mixtral", "qwen3_moe"):
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, "load_balancing_loss_func", module.load_balancing_loss_func)


def test_only_a_balanced_models_loss_is_replaced(restored):
    balanced, other = (build(output_router_logits=True) for _ in range(2))
    replace_balancing_loss(balanced, lambda *_: torch.tensor(7.0), computes_the_same)
    tokens = batches(1, 2, 8)[0]
    original = other(input_ids=tokens).aux_loss
    assert balanced(input_ids=tokens).aux_loss.item() == 7.0
    assert other(input_ids=tokens).aux_loss == original != 7.0
    with pytest.raises(IndexError):
        balanced(input_ids=tokens + 1000)
    assert other(input_ids=tokens).aux_loss == original, "a forward that failed left the replacement on"


def test_a_loss_of_another_kind_is_refused_where_the_model_returns_it(restored):
    replace_balancing_loss(build(), lambda *_: 0, lambda _: False)
    with pytest.raises(ModelError, match="set ep_balance_aux_loss to local"):
        replace_balancing_loss(build(output_router_logits=True), lambda *_: 0, lambda _: False)


# Correction biases.


def biases_after_a_step(model, trained, *, train=True):
    model.train(train)
    loss = model(input_ids=batches(1, 2, 8)[0]).logits.square().mean()
    loss.backward()
    torch.optim.SGD(trained.parameters(), lr=0.0).step()
    return model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias


def test_a_bias_moves_only_after_steps_of_the_models_own_optimizer_and_by_what_training_routed():
    model, other = build("deepseek_v3"), build()
    BiasUpdate(model, 0.25)
    assert not biases_after_a_step(model, model, train=False).any()
    assert not biases_after_a_step(model, other).any()
    moved = biases_after_a_step(model, model)
    assert set(moved.tolist()) <= {-0.25, 0.0, 0.25} and moved.any()


def test_a_bias_in_low_precision_is_kept_in_float32_from_then_on():
    model = build("deepseek_v3")
    gate = model.get_submodule("model.layers.1.mlp.gate")
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16() + 1
    BiasUpdate(model, 0.001)
    moved = biases_after_a_step(model, model)
    assert moved.dtype == torch.float32 and moved.tolist() != [1.0] * 8
    assert torch.equal(model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"], moved)


def test_a_balanced_model_is_freed():
    model = build("deepseek_v3")
    balance(model, ExpertParallelConfig(ep_balance_bias_rate=0.1, ep_z_loss=0.1))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# Refusals.


def test_a_bias_that_is_not_there_is_refused_with_the_remedy():
    with pytest.raises(ModelError, match=r"no router of Qwen3MoeForCausalLM has a correction bias .* set it to 0"):
        BiasUpdate(build(), 0.1)


def test_a_bias_of_the_base_model_is_refused_with_adapters():
    model = get_peft_model(build("deepseek_v3"), LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(ModelError, match="not saved with its adapters"):
        BiasUpdate(model, 0.1)


def z_loss_step(model):
    RouterZLoss(model, 0.1, router_logits(model), to_returned=True)
    tokens = batches(1, 2, 8)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_routers_that_hide_their_logits_are_refused():
    with pytest.raises(ModelError, match="does not say where its routers' logits are"):
        z_loss_step(build_family("deepseek_v4"))
    with pytest.raises(ModelError, match="report are probabilities"):
        z_loss_step(build_family("gemma4"))


def test_a_z_loss_without_a_loss_is_refused():
    model = build()
    RouterZLoss(model, 0.1, router_logits(model), to_returned=True)
    with pytest.raises(ModelError, match="returned none: pass `labels`"):
        model(input_ids=batches(1, 2, 8)[0])
    model.eval()(input_ids=batches(1, 2, 8)[0])


def test_a_loss_of_ones_own_beside_the_returned_one_is_refused():
    model = build()
    RouterZLoss(model, 0.1, router_logits(model), to_returned=True)
    tokens = batches(1, 2, 8)[0]
    with pytest.raises(ModelError, match="not added to the loss that this backward pass started from"):
        model(input_ids=tokens, labels=tokens).logits.mean().backward()


def test_dense_models_are_left_alone():
    balance(torch.nn.Linear(2, 2), ExpertParallelConfig(ep_balance_bias_rate=0.1, ep_z_loss=0.1))
