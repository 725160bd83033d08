"""A bare Accelerate loop that never heard of expertmesh. Prints one JSON line a step."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

accumulation, checkpoint = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
accelerator = Accelerator(gradient_accumulation_steps=accumulation)
set_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(3, 96, (48, 12), generator=torch.Generator().manual_seed(1))
# Eight sequences an optimizer step, however many processes share them.
size = 8 // accelerator.num_processes // accumulation
loader = DataLoader(data, batch_size=size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def steps(batches):
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if accelerator.is_main_process:
                print(json.dumps({"loss": sum(losses) / len(losses), "norm": norm.item()}), flush=True)
            losses = []


batches = list(loader)
half = len(batches) // 2
steps(batches[:half])
if checkpoint:
    accelerator.save_state(checkpoint)
steps(batches[half:])
if checkpoint:
    accelerator.load_state(checkpoint)
    steps(batches[half:])
accelerator.end_training()
