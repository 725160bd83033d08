"""Tiny real models of every MoE family whose weights are stored in an interesting way.

Only weights matter here: many of these models are never run. `models.py` has the families that are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ranks.models import FAMILIES, VOCABULARY, build, randomize

# For each setting that a configuration has, a size that tells it from the others.
_TINY: dict[str, object] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    linear_head_dim=8,
    linear_num_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    index_n_heads=2,
    index_head_dim=16,
    sliding_window=16,
    tie_word_embeddings=False,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    mamba_d_state=4,
    o_lora_rank=8,
    o_groups=2,
    hc_mult=2,
    swa_num_attention_heads=2,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    d_rel=4,
    rel_extent=8,
    # of images
    depth=1,
    num_heads=2,
    patch_size=4,
    image_size=16,
    num_position_embeddings=16,
    out_hidden_size=32,
    projection_intermediate_size=24,
    projection_hidden_dim=32,
    posemb_grid_size=4,
    projector_hidden_size=32,
    text_hidden_size=32,
)

# Nested settings belong to the parts of a model for more than text.
BUILDERS: dict[str, dict[str, object]] = {
    **FAMILIES,
    # concatenate or split rows of dense weights
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"]),
    "bailing_hybrid": dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "glm5_next": dict(
        text_config=dict(
            qk_rope_head_dim=0,
            layer_types=["linear_attention", "indexed_attention"],
            mlp_layer_types=["dense", "sparse"],
        )
    ),
    "minimax_m3_vl": dict(
        text_config=dict(
            dense_intermediate_size=48,
            shared_intermediate_size=24,
            rotary_dim=8,
            mlp_layer_types=["dense", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse"],
        ),
    ),
    "qwen4_exp": dict(
        text_config=dict(
            layer_types=["linear_attention", "indexed_attention"],
            hc_count=2,
            hc_lowrank=8,
            ple_layer_ids=[1],
            heads_per_ngram=2,
            ngram_vocab_size_base=40,
            make_ngram_vocab_size_divisible_by=4,
            split_ngram_parts=4,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=16,
            indexer_compress_ratio=4,
        )
    ),
    "olmo_hybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "lara_mini": dict(layer_types=["linear_attention", "full_attention"]),
    # split, and permuted for the rotary embedding
    "kimi_k25": dict(
        text_config=dict(model_type="deepseek_v3"),
        vision_config=dict(pos_emb_height=4, pos_emb_width=4, pos_emb_time=2),
    ),
    "mistral_large4": dict(text_config={}, vision_config=dict(model_type="pixtral")),
    # split between two kinds of experts
    "ernie4_5_vl_moe": dict(text_config=dict(head_dim=128, moe_intermediate_size=[24, 16], moe_num_experts=8)),
    # transposed
    "qwen3_vl_moe": dict(text_config={}, vision_config=dict(deepstack_visual_indexes=[0])),
    "aria_text": dict(moe_num_experts=8),
    # interleaved
    "inkling_mm_model": dict(
        text_config=dict(mlp_layer_types=["dense", "sparse"]),
        vision_config=dict(num_hidden_layers=3, patch_size=2),
        audio_config=dict(mel_vocab_size=8, n_mel_bins=4),
    ),
    "inkling2_loop": dict(
        text_config=dict(
            num_hidden_layers=3,
            unpadded_vocab_size=90,
            loop_layer_index_start=1,
            loop_layer_index_end=2,
            loop_gate_rank=8,
            n_layers_per_attn_res_block=1,
        ),
        vision_config=dict(model_type="inkling2_vision"),
    ),
    "inkling2": dict(text_config=dict(unpadded_vocab_size=90)),
    # experts beside a dense MLP
    "gemma4": dict(
        text_config=dict(
            enable_moe_block=True,
            top_k_experts=2,
            hidden_size_per_layer_input=0,
            global_head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=None,
        audio_config=None,
    ),
    "diffusion_gemma": dict(
        text_config=dict(top_k_experts=2, global_head_dim=16, layer_types=["sliding_attention", "full_attention"]),
        vision_config=dict(model_type="gemma4_vision", position_embedding_size=16),
    ),
    "granitemoehybrid": dict(
        mamba_n_heads=4, shared_intermediate_size=24, layer_types=["linear_attention", "full_attention"]
    ),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "qwen3_next": dict(layer_types=["linear_attention", "full_attention"]),
    "qwen3_5_moe": dict(text_config=dict(layer_types=["linear_attention", "full_attention"])),
    "qwen3_5_moe_text": dict(layer_types=["linear_attention", "full_attention"]),
    "ernie4_5_moe": dict(moe_num_experts=8),
    "lfm2_moe": dict(num_dense_layers=1, layer_types=["conv", "full_attention"]),
    # only rename what is beside the experts
    "axk1": {},
    "beam": {},
    "cohere2_moe": {},
    "deepseek_v4": {},
    "dots1": {},
    "exaone_moe": {},
    "flint": {},
    "glm4v_moe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "phimoe": {},
    "sarvam_moe": {},
    "step3p7": {},
}


def build_family(name: str, **config_changes: object) -> PreTrainedModel:
    """A seeded model of a family in float32 and training mode, every weight and buffer different from its neighbours.

    Changes go to the configuration; for models of more than text as dictionaries by part (`text_config={...}`).
    """
    if name in FAMILIES:
        model = build(name, **config_changes)
    else:
        torch.manual_seed(0)
        config = _tiny(CONFIG_MAPPING[name], {**BUILDERS[name], **config_changes})
        model = (AutoModelForImageTextToText if config.sub_configs else AutoModelForCausalLM).from_config(config)
        randomize(model)
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point():
            buffer.add_(torch.rand_like(buffer) * 0.01)
    return model.train()


def _tiny(config_class: type[PreTrainedConfig], changes: Mapping[str, object]) -> PreTrainedConfig:
    settings = {name: size for name, size in _TINY.items() if name in config_class.__dataclass_fields__}
    parts = {
        name: _tiny_part(default_class, changes.get(name, {}))
        for name, default_class in config_class.sub_configs.items()
    }
    return config_class(**{**settings, **changes, **parts})


def _tiny_part(default_class: type[PreTrainedConfig], changes: Mapping[str, object] | None) -> PreTrainedConfig | None:
    """One part of a model for more than text; None where the model has no such part."""
    if changes is None:
        return None
    return _tiny(CONFIG_MAPPING[changes["model_type"]] if "model_type" in changes else default_class, changes)
