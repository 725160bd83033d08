"""`ep_layers: te` against the model's own layers, on the emulation of Transformer Engine, in float32.

Relative errors: 1e-6 of the loss, 1e-5 of every gradient's norm (measured: 1e-7 and 2e-6). With 8 bits: the error
that 8 bits make, and nothing from rows that only fill up.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from unittest import mock

import pytest
import torch
from emulation import te_device
from emulation.install import installed
from peft import LoraConfig, get_peft_model
from processes import TESTS, run_ranks
from ranks.models import FAMILIES, batches, build
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import masking_utils as hf
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.layers import replace_layers

CPU = torch.device("cpu")
IDS = batches(1, 2, 12)[0]
# Three tokens of padding on the left, and three on the right.
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
MASK[1, 9:] = 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
INPUTS = {
    "rows": {"input_ids": IDS, "labels": IDS},
    "padded": {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)},
    "packed": {"input_ids": IDS, "position_ids": POSITIONS, "labels": IDS},
}
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "groups": ("qwen3_moe", {"num_key_value_heads": 1}),
    "windows": ("mixtral", {"sliding_window": 4}),
    "tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "biases": ("qwen3_moe", {"attention_bias": True}),
    "short windows and sinks": ("gpt_oss", {"sliding_window": 4}),
}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(te_device, "ALLOW_CPU", True)
    with installed("te") as package:
        yield package


def replace(model, fp8=False, **choices):
    replace_layers(model, ExpertParallelConfig(ep_layers="te", **choices), CPU, fp8)
    return model


def engines_of(model):
    """The modules that are Transformer Engine's now, by name."""
    return [name for name, module in model.named_modules() if type(module).__module__.startswith("expertmesh_plugins")]


def trained(model, inputs):
    """The loss, and every gradient."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def errors(model, reference, inputs):
    """The relative error of the loss, and the largest of a gradient's."""
    (loss, gradients), (expected, theirs) = trained(model, inputs), trained(reference, inputs)
    if gradients.keys() != theirs.keys():
        return abs(loss - expected) / abs(expected), math.inf
    worst = max((g - theirs[name]).norm().item() / theirs[name].norm().item() for name, g in gradients.items())
    return abs(loss - expected) / abs(expected), worst


def is_same(model, reference, inputs):
    loss, gradient = errors(model, reference, inputs)
    return loss < 1e-6 and gradient < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_are_the_same(variant):
    family, changes = VARIANTS[variant]
    reference = build(family, **changes)
    model = replace(build(family, **changes))
    assert engines_of(model)
    assert model.config._attn_implementation.startswith("transformer_engine")
    for inputs in INPUTS.values():
        assert is_same(model, reference, inputs)


def test_a_frozen_and_recomputed_model_is_the_same():
    reference, model = build(), replace(build())
    for each in (reference, model):
        each.model.layers[0].self_attn.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert is_same(model, reference, INPUTS["padded"])


def test_lengths_that_a_collator_counted_are_used():
    reference, model = build(), replace(build())
    bounds = torch.tensor([0, 5, 8, 12, 14, 24], dtype=torch.int32)
    row = {"input_ids": IDS.view(1, -1), "labels": IDS.view(1, -1), "position_ids": POSITIONS.view(1, -1)}
    counted = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=10, max_length_k=10)
    assert abs(model(**row, **counted).loss - reference(**row).loss) < 1e-6


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_generation_is_the_same_with_a_cache(family):
    reference, model = build(family).eval(), replace(build(family)).eval()
    prompt = dict(input_ids=IDS[:, :8], attention_mask=MASK[:1, :8].expand(2, -1), do_sample=False, max_new_tokens=6)
    assert torch.equal(model.generate(**prompt, use_cache=True), reference.generate(**prompt, use_cache=True))


def test_keys_and_parameters_stay_and_load_strictly_both_ways(tmp_path):
    reference, model = build("deepseek_v3"), build("deepseek_v3")
    before = dict(model.named_parameters())
    replace(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert "transformer_engine" not in (tmp_path / "config.json").read_text()


def test_tied_weights_stay_tied():
    model = replace(build(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("adapted_first", (True, False))
def test_adapters_are_found_before_and_after(adapted_first):
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    reference = get_peft_model(build("qwen2_moe"), copy.deepcopy(adapters))
    torch.manual_seed(3)
    model = build("qwen2_moe")
    model = replace(get_peft_model(model, adapters)) if adapted_first else get_peft_model(replace(model), adapters)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert len(engines_of(model)) == 14 + 5
    assert not any("lora_" in name for name in engines_of(model))
    model.load_state_dict(reference.state_dict())
    assert is_same(model, reference, INPUTS["rows"])
    merged = [each.merge_and_unload()(**INPUTS["rows"]).loss for each in (model, reference)]
    assert abs(merged[0] - merged[1]) < 1e-6


def test_routers_gates_experts_and_the_head_stay():
    model = replace(build("qwen2_moe"))
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == [
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.1.mlp.shared_expert_gate",
        "lm_head",
    ]


def test_a_shared_expert_as_wide_as_there_are_experts_is_no_router():
    model = replace(build("qwen2_moe", shared_expert_intermediate_size=8))
    assert "model.layers.0.mlp.shared_expert.gate_proj" in engines_of(model)
    assert "model.layers.0.mlp.shared_expert_gate" not in engines_of(model)


def test_patterns_say_what_may_be_replaced():
    only = engines_of(replace(build(), ep_layers_only="*.q_proj, *norm"))
    assert only and all(name.endswith(("q_proj", "norm")) for name in only)
    kept = engines_of(replace(build(), ep_layers_keep="model.layers.0.*"))
    assert kept and not any(name.startswith("model.layers.0.") for name in kept)
    with pytest.raises(ConfigError, match=r"ep_layers_keep: '\*.qproj' fits the name of no module"):
        replace(build(), ep_layers_keep="*.qproj")


def test_attention_of_a_kept_module_stays():
    model = replace(build(), ep_layers_keep="model.layers.0.self_attn")
    from expertmesh_plugins.transformer_engine import attention

    with mock.patch.object(attention, "_compute", wraps=attention._compute) as computed:
        model(**INPUTS["rows"])
    assert computed.call_count == 1
    assert is_same(model, build(), INPUTS["padded"])


def test_what_cannot_be_taken_is_listed_once(caplog):
    model = build()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        replace(model)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "expertmesh.layers"]
    assert said == (
        "ep_layers te: as they were stay model.layers.0.self_attn.q_proj (it has hooks or a forward of its own)"
    )


@pytest.mark.parametrize("kind, is_centered", ((LlamaRMSNorm, False), (GemmaRMSNorm, True), (Qwen3NextRMSNorm, True)))
def test_norms_are_recognised_by_what_they_compute(kind, is_centered):
    model = build()
    model.model.norm = kind(32, eps=3e-3)
    nn.init.normal_(model.model.norm.weight)
    reference = copy.deepcopy(model)
    replace(model)
    assert model.model.norm.zero_centered_gamma is is_centered
    assert model.model.norm.eps == 3e-3
    assert is_same(model, reference, INPUTS["rows"])


def test_other_norms_stay():
    model = build()
    model.model.extra = nn.ModuleList([Qwen3NextRMSNormGated(32), nn.LayerNorm(32)])
    replace(model)
    assert [type(norm) for norm in model.model.extra] == [Qwen3NextRMSNormGated, nn.LayerNorm]


def masks():
    """Requests of Transformers' masks: arguments, and whether Transformer Engine's kernels have them."""
    causal, window = hf.causal_mask_function, hf.sliding_window_causal_mask_function(4)
    ids = hf.find_packed_sequence_indices(POSITIONS)
    packed = hf.packed_sequence_mask_function(ids)
    padding = {"attention_mask": MASK.bool()}
    chunks = hf.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long))
    remapped = [hf.remap_positions_for_packed_sequence(each, POSITIONS) for each in (causal, window)]
    return {
        "causal": (dict(mask_function=causal), True),
        "causal padded": (dict(mask_function=causal, **padding), True),
        "window": (dict(mask_function=window), True),
        "window padded": (dict(mask_function=window, **padding), True),
        "wide window": (dict(mask_function=hf.sliding_window_causal_mask_function(40)), True),
        "both ways": (dict(mask_function=hf.bidirectional_mask_function), True),
        "both ways padded": (dict(mask_function=hf.bidirectional_mask_function, **padding), True),
        "window both ways": (dict(mask_function=hf.sliding_window_bidirectional_mask_function(3)), True),
        "packed": (dict(mask_function=hf.and_masks(remapped[0], packed)), True),
        "packed window": (dict(mask_function=hf.and_masks(remapped[1], packed)), True),
        "positions without sequences": (dict(mask_function=remapped[0]), False),
        "chunks": (dict(mask_function=chunks), False),
        "blocks": (dict(mask_function=hf.or_masks(causal, hf.blockwise_overlay(ids))), False),
        "somebody's": (dict(mask_function=hf.and_masks(causal, lambda b, h, q, k: q < k + 3), use_vmap=True), False),
        "cache": (dict(mask_function=causal, q_length=4, q_offset=8), False),
    }


@pytest.mark.parametrize("name", masks())
def test_masks_mean_what_transformers_means(name):
    from expertmesh_plugins.transformer_engine import attention, mask

    request, is_taken = masks()[name]
    request = dict(batch_size=2, kv_length=12) | {"q_length": 12} | request
    made = mask.make_mask(hf.sdpa_mask, **request, allow_is_causal_skip=False)
    dense = hf.sdpa_mask(**request, allow_is_causal_skip=False)
    assert isinstance(made, mask.Mask) is is_taken
    if not is_taken:
        assert torch.equal(made, dense)
        return
    assert torch.equal(made.tensor, dense)
    query, key, value = (torch.randn(2, heads, 12, 8) for heads in (4, 2, 2))
    module = nn.Module()
    output, _ = attention.attend(lambda module: None, module, query, key, value, made)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, dense, enable_gqa=True).transpose(1, 2)
    # Of padding nothing is asked, and nothing comes.
    takes_part = MASK.bool() if "padded" in name else torch.ones_like(MASK, dtype=torch.bool)
    torch.testing.assert_close(output[takes_part], expected[takes_part], rtol=1e-5, atol=1e-6)
    assert not output[~takes_part].any()


def test_scores_are_capped_and_scaled():
    from expertmesh_plugins.transformer_engine import attention

    query, key, value = (torch.randn(2, 2, 6, 8) for _ in range(3))
    output, _ = attention.attend(None, nn.Module(), query, key, value, None, scaling=0.7, softcap=1.5, is_causal=False)
    scores = 1.5 * torch.tanh(0.7 * query @ key.transpose(2, 3) / 1.5)
    torch.testing.assert_close(output, (scores.softmax(-1) @ value).transpose(1, 2), rtol=1e-5, atol=1e-6)


FAULTS = {
    "a window one too wide": ("windows", "attention._window", lambda pattern, length: (pattern.window[0] + 1, 0)),
    "no window": ("windows", "attention._window", lambda pattern, length: (-1, 0)),
    "no sinks": ("gpt_oss", "attention._call", lambda core, sinks, tensors, options: core(*tensors, **options)),
    "packed rows as one sequence": ("qwen3_moe", "mask.Sequences.packed", lambda ids: None),
    "padding taken part": ("qwen3_moe", "mask.Sequences.padded", lambda takes_part: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault):
    variant, where, wrong = FAULTS[fault]
    family, changes = VARIANTS[variant]
    reference, model = build(family, **changes), replace(build(family, **changes))
    with mock.patch(f"expertmesh_plugins.transformer_engine.{where}", wrong):
        assert not all(is_same(model, reference, inputs) for inputs in INPUTS.values())


def test_a_wrong_norm_is_noticed():
    reference, model = build(), replace(build())
    model.model.norm.zero_centered_gamma = True
    assert not is_same(model, reference, INPUTS["rows"])


# Every token goes to every expert, so that no rounding can send it to another one.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts_per_tok": 8}


@pytest.mark.parametrize("capability, recipe", (((9, 0), "Float8CurrentScaling"), ((10, 0), "MXFP8BlockScaling")))
def test_8_bits_by_the_recipe_that_the_device_has(monkeypatch, capability, recipe):
    monkeypatch.setattr(te_device, "CAPABILITY", capability)
    reference, model = build(**WIDE), replace(build(**WIDE), fp8=True)
    assert type(model.model.layers[0].self_attn.q_proj._recipe).__name__ == recipe
    # Seven tokens: rows of zeros have to fill up what Transformer Engine would refuse.
    inputs = {"input_ids": IDS[:1, :7], "labels": IDS[:1, :7]}
    loss, gradient = errors(model, reference, inputs)
    assert 1e-4 < loss < 0.01
    assert 1e-2 < gradient < 0.3


def test_rows_that_fill_up_change_nothing():
    model = replace(build(**WIDE), fp8=True)
    linear = model.model.layers[0].self_attn.q_proj
    rows = torch.randn(16, 64, requires_grad=True)
    whole = linear(rows)
    part = linear(torch.cat([rows[:13], torch.zeros(3, 64)]))[:13]
    padded = linear(rows[:13].view(1, 13, 64))
    assert torch.equal(padded[0], part)
    assert whole.shape == (16, linear.out_features) and padded.shape == (1, 13, linear.out_features)


def test_layers_too_narrow_for_8_bits_stay_and_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        model = replace(build("qwen2_moe"), fp8=True)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "expertmesh.layers"]
    assert "model.layers.0.mlp.shared_expert.gate_proj" in said
    assert "(with 8 bits both sizes must be multiples of 16)" in said
    assert "model.layers.0.self_attn.q_proj" in engines_of(model)
    assert "model.layers.0.mlp.shared_expert.gate_proj" not in engines_of(model)


REFUSALS = {
    "recipe": ((9, 0), dict(fp8=True, ep_fp8_recipe="mxfp8"), "10.0 or higher .*: set ep_fp8_recipe to float8_current"),
    "device": ((8, 0), dict(fp8=True), "8.9 or higher .*: set mixed_precision to bf16"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_8_bits_are_refused_with_the_reason(monkeypatch, name):
    capability, choices, said = REFUSALS[name]
    monkeypatch.setattr(te_device, "CAPABILITY", capability)
    with pytest.raises(ConfigError, match=said):
        replace(build(), **choices)


def test_what_cannot_be_used_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="mixed_precision fp8 needs layers that multiply in 8 bits"):
        replace_layers(build(), ExpertParallelConfig(), CPU, fp8=True)
    with pytest.raises(ConfigError, match="ep_layers 'tee' is unknown"):
        replace_layers(build(), ExpertParallelConfig(ep_layers="tee"), CPU)
    monkeypatch.setattr(te_device, "ALLOW_CPU", False)
    with pytest.raises(ConfigError, match="Transformer Engine computes on cuda, not on cpu: set ep_layers to auto"):
        replace(build())


@pytest.fixture(scope="module")
def parallel():
    return json.loads(run_ranks(TESTS / "ranks" / "te_layers.py", 2)[0].stdout.splitlines()[-1])


def test_models_on_ranks_are_those_of_one_process(parallel):
    exact = {name: found for name, found in parallel.items() if not name.endswith("bits") and name != "bf16"}
    assert len(exact) == 11
    for found in exact.values():
        assert all(error < 1e-5 for error in found.values())


def test_models_on_ranks_in_fewer_bits(parallel):
    assert parallel["bf16"]["gradient"] < 2 * parallel["bf16"]["one_bf16_process"]
    in_8_bits = [found for name, found in parallel.items() if name.endswith("8 bits")]
    assert len(in_8_bits) == 3
    assert 1e-5 < in_8_bits[0]["loss"] < 0.02
    # What is computed again is computed in the same bits.
    assert all(found == in_8_bits[0] for found in in_8_bits)


def test_compiled_attention_is_not_cut():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = replace(build())
    for layer in model.model.layers:
        layer.self_attn.compile(backend="aot_eager")
    assert is_same(model, build(), INPUTS["rows"])
    assert not torch._dynamo.utils.counters["graph_break"]
