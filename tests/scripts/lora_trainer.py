"""A Trainer script with PEFT that never heard of expertmesh.

Arguments: the base model's folder, the output folder, target parameters separated by commas, and maybe a checkpoint to
resume from. Prints a JSON line a step; leaves the adapter in `final` and the trained model's logits in `logits.pt`.
"""

import json
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

base, output, parameters, *resume = sys.argv[1:]
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
config = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "v_proj"],
    target_parameters=parameters.split(","),
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, config)
tokens = torch.randint(3, 96, (64, 12), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=output,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=5,
    logging_steps=1,
    learning_rate=1e-2,
    save_steps=2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_drop_last=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=resume[0] if resume else None)
trainer.save_model(os.path.join(output, "final"))
trainer.model_wrapped.eval()
with torch.no_grad():
    logits = trainer.model_wrapped(input_ids=tokens[:4]).logits
    with trainer.model.disable_adapter():
        without = trainer.model_wrapped(input_ids=tokens[:4]).logits
if trainer.is_world_process_zero():
    torch.save({"adapted": logits, "base": without}, os.path.join(output, "logits.pt"))
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(json.dumps({"step": entry["step"], "loss": entry["loss"], "norm": entry["grad_norm"]}), flush=True)
# A rank must not exit right behind a collective: gloo's threads may still hold its tensors (pytorch#179291).
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
