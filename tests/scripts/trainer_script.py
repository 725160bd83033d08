"""A transformers.Trainer script that never heard of expertmesh. Prints the Trainer's own log as JSON."""

import json
import os
import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed

output, resume = sys.argv[1], len(sys.argv) > 2
set_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
tokens = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=output,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=4,
    logging_steps=1,
    learning_rate=1e-3,
    save_steps=2,
    max_grad_norm=1.0,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_drop_last=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=os.path.join(output, "checkpoint-2") if resume else None)
trainer.save_model(os.path.join(output, "final"))
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(json.dumps({"step": entry["step"], "loss": entry["loss"], "norm": entry["grad_norm"]}), flush=True)
# A rank must not exit right behind a collective: gloo's threads may still hold its tensors (pytorch#179291).
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
