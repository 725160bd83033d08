"""A script whose model cannot be trained with expert parallelism; which one is its argument."""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

kind = sys.argv[1]
accelerator = Accelerator()
small = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
if kind == "dense":
    model = LlamaForCausalLM(LlamaConfig(**small))
else:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, moe_intermediate_size=24, num_experts=7, head_dim=16))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
accelerator.prepare(model, optimizer)
print("not refused")
