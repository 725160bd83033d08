"""A script whose model cannot be trained with expert parallelism; which one is its argument."""

import sys

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

kind = sys.argv[1]
accelerator = Accelerator()
small = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
if kind == "dense":
    model = LlamaForCausalLM(LlamaConfig(**small))
else:
    experts = 7 if kind == "indivisible" else 8
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, moe_intermediate_size=24, num_experts=experts, head_dim=16))
if kind == "adapted":
    model = get_peft_model(model, LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
accelerator.prepare(model, optimizer)
print("not refused")
