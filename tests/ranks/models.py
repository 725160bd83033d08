"""Tiny real models for the distributed tests. Every size fits `grouped_mm`'s 16-byte strides."""

from __future__ import annotations

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_DEEPSEEK = dict(
    head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=24,
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
)

# One family for each layout of experts, and those that differ in what surrounds them.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_moe": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
    ),
    "qwen2_moe": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.0,
    ),
    "mixtral": dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.0),
    "olmoe": dict(intermediate_size=24, num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.0),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # interleaved, transposed, biased, own gate
    "gpt_oss": dict(
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # no gate
    "nemotron_h": dict(
        intermediate_size=48,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        layers_block_type=["attention", "moe"],
    ),
    # fused on disk
    "granitemoe": dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.0),
}


def build(family: str = "qwen3_moe", **changes: object) -> PreTrainedModel:
    """A seeded model of a family, every weight clearly different from zero, in training mode without dropout."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    return model.train()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Give every parameter values that are clearly different from zero."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.05)


def batches(count: int, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Seeded token ids `[count, rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count, rows, length), generator=generator)
