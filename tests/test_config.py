"""What is refused before anything is loaded, and that each refusal says what to change."""

from __future__ import annotations

import pytest
from ranks.models import FAMILIES, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from expertmesh.config import EXPERT_KEYS, KNOWN_KEYS, YAML_PREFIX, ExpertParallelConfig, refuse_unknown_keys
from expertmesh.dispatch import check_dispatcher
from expertmesh.errors import ConfigError, ModelError
from expertmesh.experts import ExpertsSpec, check_divisible, find_experts


@pytest.mark.parametrize(
    ("sizes", "world_size", "dp_shard", "efsdp"),
    [
        (dict(ep_size=8), 8, 8, 1),
        (dict(ep_size=4), 8, 8, 2),
        (dict(ep_size=8, dp_replicate_size=2), 16, 8, 1),
        (dict(ep_size=64, dp_shard_size=128), 128, 128, 2),
        (dict(), 1, 1, 1),
    ],
)
def test_dp_shard_takes_the_ranks_that_are_left(sizes, world_size, dp_shard, efsdp):
    config = ExpertParallelConfig(**sizes).resolve(world_size)
    assert (config.dp_shard_size, config.efsdp_size) == (dp_shard, efsdp)


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (dict(ep_size=3), 8, "choose an ep_size among 1, 2, 4, 8"),
        (dict(dp_shard_size=4, ep_size=4), 8, r"start 4 processes .*or change the sizes so that their product is 8"),
        (dict(dp_replicate_size=3), 8, "but 8 processes were started"),
        (dict(ep_size=16), 8, "does not divide"),
        (dict(ep_size=0), 8, "ep_size must be an integer of at least 1"),
        (dict(ep_size=2.5), 8, "ep_size must be an integer"),
        (dict(tp_size=2), 8, "set tp_size to 1"),
        (dict(cp_size=2), 8, "set cp_size to 1"),
        (dict(ep_loss="none"), 8, "choose among auto, hf, chunked, liger"),
        (dict(ep_checkpoint_format="zip"), 8, "choose among hf, dcp"),
        (dict(ep_async_save="yes"), 8, "ep_async_save must be true or false"),
        (dict(ep_balance_aux_loss="both"), 8, "choose among global, local"),
        (dict(ep_balance_bias_rate=-0.1), 8, "ep_balance_bias_rate must be a number of at least 0, but is -0.1"),
        (dict(ep_z_loss=float("nan")), 8, "ep_z_loss must be a number of at least 0, but is nan"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_remedy(sizes, world_size, message):
    with pytest.raises(ConfigError, match=message):
        ExpertParallelConfig(**sizes).validate(world_size)


def test_yaml_keys_are_read_with_their_prefix_and_accelerates_own_are_skipped():
    block = {"parallelism_config_ep_size": "4", "parallelism_config_dp_shard_size": -1, "parallelism_config_sp_size": 1}
    assert ExpertParallelConfig.from_mapping(block) == ExpertParallelConfig(ep_size=4)


def test_environment_spells_the_keys_in_capitals():
    environment = {"PARALLELISM_CONFIG_EP_SIZE": "2", "PARALLELISM_CONFIG_EP_DISPATCHER": "all_to_all", "HOME": "/"}
    assert ExpertParallelConfig.from_environment(environment) == ExpertParallelConfig(
        ep_size=2, ep_dispatcher="all_to_all"
    )


def test_every_known_key_is_accepted():
    refuse_unknown_keys(YAML_PREFIX + key for key in KNOWN_KEYS)


@pytest.mark.parametrize(
    ("key", "nearest"), [("parallelism_config_ep_szie", "ep_size"), ("parallelism_config_dispatcher", "ep_dispatcher")]
)
def test_an_unknown_key_names_the_nearest_known_one(key, nearest):
    with pytest.raises(ConfigError, match=f"did you mean `parallelism_config_{nearest}`"):
        refuse_unknown_keys([key])


def test_deepspeeds_sequence_parallelism_is_refused():
    with pytest.raises(ConfigError, match="set sp_size to 1"):
        ExpertParallelConfig.from_mapping({"ep_size": 2, "sp_size": 2})


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="parallelism_config_ep_size must be an integer, but is 'all'"):
        ExpertParallelConfig.from_mapping({"ep_size": "all"})


@pytest.mark.parametrize(("text", "value"), [("True", True), (True, True), ("no", False), ("0", False)])
def test_a_switch_is_read_as_a_yaml_or_an_environment_spells_it(text, value):
    assert ExpertParallelConfig.from_mapping({"parallelism_config_ep_async_save": text}).ep_async_save is value


def test_a_number_is_read_as_text_or_refused():
    assert ExpertParallelConfig.from_mapping({"parallelism_config_ep_balance_bias_rate": "1e-3"}) == (
        ExpertParallelConfig(ep_balance_bias_rate=0.001)
    )
    with pytest.raises(ConfigError, match="parallelism_config_ep_z_loss must be a number, but is 'small'"):
        ExpertParallelConfig.from_mapping({"ep_z_loss": "small"})


def test_a_switch_that_is_neither_is_refused():
    with pytest.raises(ConfigError, match="parallelism_config_ep_async_save must be true or false, but is 'maybe'"):
        ExpertParallelConfig.from_mapping({"ep_async_save": "maybe"})


def test_a_dispatcher_that_nobody_registered_is_refused():
    with pytest.raises(
        ConfigError, match="'carrier_pigeon' is unknown: set ep_dispatcher to auto or one of all_to_all"
    ):
        check_dispatcher("carrier_pigeon")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_found_by_their_structure(family):
    found = find_experts(build(family))
    assert found
    assert all(ExpertsSpec.of(module).num_experts == 8 for module in found.values())


def test_a_dense_model_is_refused():
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    )
    with pytest.raises(ModelError, match="LlamaForCausalLM has no routed experts"):
        find_experts(dense)


def test_experts_that_ep_size_does_not_divide_are_refused_with_those_it_could_be():
    with pytest.raises(
        ModelError, match="has 6 experts, which ep_size 4 does not divide: set ep_size to one of 1, 2, 3, 6"
    ):
        check_divisible(find_experts(build(num_experts=6)), 4)


def test_a_module_that_breaks_its_own_promise_is_refused():
    experts = next(iter(find_experts(build("gpt_oss")).values()))
    experts.down_proj_bias = nn.Parameter(experts.down_proj_bias[:3])
    with pytest.raises(ModelError, match=r"down_proj_bias is of shape \(3, 32\)"):
        ExpertsSpec.of(experts)


def test_every_key_is_known_wherever_it_can_be_set():
    from expertmesh_plugins.accelerate import ExpertMeshConfig

    ours = {name for name in ExpertParallelConfig.__dataclass_fields__ if name.startswith("ep_")}
    assert (
        ours == EXPERT_KEYS.keys() == {name for name in ExpertMeshConfig.__dataclass_fields__ if name.startswith("ep_")}
    )
    assert all(EXPERT_KEYS.values())
