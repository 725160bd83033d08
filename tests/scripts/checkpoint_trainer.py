"""A transformers.Trainer script that trains, resumes and keeps its best model, as its arguments say.

Arguments: a folder and any of `train`, `best`, `resume` (the newest in the folder's `train`), `resume:CHECKPOINT`, and
the same with `lora-` in front. Prints a JSON line for each: the losses of its last three steps, and a digest of the
trained parameters where these begin (`train`: after step 2; `best`: of the best ones) and of the final ones.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


def build(lora):
    set_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])) if lora else model


def digest(model):
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.update(name.encode() + whole.detach().numpy().tobytes())
    return found.hexdigest()


class Digests(TrainerCallback):
    def __init__(self):
        self.saved, self.begin = {}, None

    def on_train_begin(self, arguments, state, control, model=None, **_):
        self.begin = digest(model)

    def on_step_end(self, arguments, state, control, model=None, **_):
        self.saved[state.global_step] = digest(model)


def run(output, word):
    name, _, checkpoint = word.partition(":")
    kind, lora = name.removeprefix("lora-"), name.startswith("lora-")
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True} | {
        # The loss falls, so that the first checkpoint is the best of these.
        "metric_for_best_model": "eval_loss", "greater_is_better": True, "save_total_limit": 2,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(output / ("train" if word == "resume" else name)),
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_drop_last=True,
        per_device_eval_batch_size=2,
        **(best if kind == "best" else {"save_steps": 2 if kind == "train" else 100}),
    )
    tokens = torch.randint(3, 12, (32, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    digests = Digests()
    trainer = Trainer(
        build(lora), arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[digests], processing_class=None
    )
    trainer.train(resume_from_checkpoint=(checkpoint or True) if kind == "resume" else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-3:]
    begin = {"train": digests.saved.get(2), "best": digests.saved.get(1), "resume": digests.begin}[kind]
    end = digest(trainer.model)
    if trainer.is_world_process_zero():
        print(json.dumps({"begin": begin, "losses": losses, "end": end}), flush=True)
    trainer.accelerator.wait_for_everyone()
    return trainer


for word in sys.argv[2:]:
    trainer = run(Path(sys.argv[1]), word)
trainer.end()
