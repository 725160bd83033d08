"""What is known to go wrong with LoRA on experts: each trap is tried on four ranks, `ep` 2 on two replicas."""

from __future__ import annotations

import json

import pytest
from expertmesh_plugins.peft import adapted_experts
from peft import LoraConfig, get_peft_model
from processes import TESTS, run_ranks
from ranks.models import build

from expertmesh.errors import ModelError

EXACT = {"loss": 1e-5, "gradient": 1e-5, "norm": 1e-5, "parameter": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traps")
    rank_0, *_ = run_ranks(TESTS / "ranks" / "lora_traps.py", 4, folder, timeout=300)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize("targets", ["both", "up", "down"])
def test_each_expert_gets_from_peft_what_it_was_trained_with(found, targets):
    """`lora_A` lies expert after expert on disk, and `lora_B` has the experts innermost."""
    assert found["golden"][targets]["error"] <= 1e-6
    assert found["golden"][targets]["misread"] > 0.1, "reading lora_B like lora_A is not the same"


def test_names_say_which_projection_only_where_both_are_adapted(found):
    keys = {name: {key.split(".mlp.")[1] for key in golden["keys"]} for name, golden in found["golden"].items()}
    outer = {"experts.lora_A.weight", "experts.lora_B.weight"}
    inner = {"experts.base_layer.lora_A.weight", "experts.base_layer.lora_B.weight"}
    assert keys == {"both": outer | inner, "up": outer, "down": outer}


def test_adapters_of_ranks_with_different_seeds_never_drift(found):
    # Of 2 layers: q, v, up and down have two tensors each.
    assert found["drift"] == {"before": 16, "after": 16}


def test_two_adapters_take_turns_and_none_is_the_base(found):
    assert {name: found["switching"][name] <= 1e-5 for name in ("default", "other", "none")} == {
        "default": True, "other": True, "none": True,
    }  # fmt: skip


def test_two_adapters_at_once_are_refused_by_name(found):
    assert found["switching"]["both"].startswith("ModelError: the adapters default, other are active at once")


def test_gradients_are_clipped_by_one_norm(found):
    clipping = found["clipping"]
    assert clipping["ranks"] == [pytest.approx(clipping["one process"], rel=1e-5)] * 4
    assert len(set(clipping["ranks"])) == 1
    assert clipping["clipped"] == pytest.approx(0.1, rel=1e-4)


def test_a_base_in_bf16_costs_no_gradient_no_state_and_no_traffic(found):
    frozen = found["frozen_base"]
    assert (frozen["frozen dtypes"], frozen["trained dtypes"]) == (["torch.bfloat16"], ["torch.float32"])
    assert [frozen[name] for name in ("frozen gradients", "missing gradients", "frozen states", "states")] == [0] * 4
    assert frozen["reduced bytes"] == frozen["adapter bytes"] > 0


def test_any_rank_trains_in_bf16_with_the_grouped_gemm(found):
    errors = found["odd_rank_in_bf16"]
    assert errors["ours"] <= 2 * errors["one bf16 process"] < 0.5


@pytest.mark.parametrize("targets", ["qwen2_moe", "mixtral", "all targets of a recipe"])
def test_names_of_linears_that_peft_rewrites_train_like_in_one_process(found, targets):
    assert all(found["rewritten_targets"][targets][name] <= limit for name, limit in EXACT.items())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rank", "experts.base_layer.lora_A.weight is of shape (32, 32) instead of (64, 32)"),
        ("fewer", "experts.base_layer.lora_A.weight is not in the model"),
        ("more", "k_proj.lora_A.weight is missing"),
        ("model", "experts.base_layer.lora_B.weight is of shape (48, 32) instead of (96, 32)"),
    ],
)
def test_adapters_of_another_configuration_or_model_are_refused_by_name(found, kind, message):
    refusal = found["foreign_folders"][kind]
    assert refusal.startswith("CheckpointError: ") and message in refusal
    assert refusal.endswith("resume with the LoraConfig that the checkpoint was trained with.")


# Refused before anything is sharded, on any number of ranks.


def adapt(family="qwen3_moe", **config):
    return get_peft_model(build(family), LoraConfig(**{"r": 4, "target_modules": [], **config}))


def test_an_adapter_on_a_bias_is_refused_by_name():
    with pytest.raises(ModelError, match=r"`gate_up_proj_bias`.*adapt gate_up_proj or down_proj instead"):
        adapted_experts(adapt("gpt_oss", target_parameters=["experts.gate_up_proj_bias"]))


@pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning")
@pytest.mark.parametrize("others", [[], ["experts.down_proj"]])
def test_a_target_parameter_that_matches_nothing_is_refused_by_name(others):
    model = adapt(target_modules=["q_proj"], target_parameters=[*others, "experts.gate_up"])
    with pytest.raises(ModelError, match=r"`experts.gate_up` matches no parameter"):
        adapted_experts(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"lora_dropout": 0.1}, "lora_dropout != 0"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"r": 0}, "`r` should be a positive integer"),
    ],
)
def test_what_peft_cannot_put_on_parameters_it_says_itself(config, message):
    with pytest.raises(ValueError, match=message):
        adapt(target_parameters=["experts.gate_up_proj"], **config)


@pytest.mark.parametrize(
    ("target", "layers"), [("model.layers.0.mlp.experts.down_proj", 1), ("experts.down_proj", 2), ("down_proj", 2)]
)
def test_target_parameters_are_matched_as_peft_matches_them(target, layers):
    assert len(adapted_experts(adapt(target_parameters=[target]))) == layers
