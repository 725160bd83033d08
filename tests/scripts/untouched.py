"""A script whose `prepare` is refused: each rank says whether its weights are still what they were."""

import torch
from accelerate import Accelerator
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

accelerator = Accelerator()
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=8, head_dim=16))
optimizer = torch.optim.AdamW(model.parameters())
before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
try:
    accelerator.prepare(model, optimizer)
finally:
    touched = [
        name
        for name, parameter in model.named_parameters()
        if parameter is not before[name][0] or not torch.equal(parameter, before[name][1])
    ]
    print("\n".join(touched) or "untouched", flush=True)
