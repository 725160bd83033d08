"""Four scripts that start from a model in a folder and never heard of expertmesh. Each prints its losses."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

kind, folder, output = sys.argv[1:4]
processes = int(os.environ.get("WORLD_SIZE", "1"))
set_seed(0)
words = [f"w{number}" for number in range(90)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
texts = [" ".join(words[(7 * row + 3 * column) % 90] for column in range(12)) for row in range(32)]
settings = dict(
    output_dir=output, per_device_train_batch_size=8 // processes, max_steps=3, logging_steps=1, learning_rate=1e-3,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
)  # fmt: skip


def loop():
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(folder)
    show(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.tensor(tokenizer(texts)["input_ids"])
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = accelerator.reduce(loss.detach(), "mean").item()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if accelerator.is_main_process:
            print(json.dumps({"loss": loss, "norm": norm.item()}), flush=True)
    accelerator.end_training()


def trainer():
    rows = [{"input_ids": row, "labels": row} for row in tokenizer(texts)["input_ids"]]
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder), args=TrainingArguments(**settings), train_dataset=rows
    )


def sft():
    # The trainer loads the model itself.
    return SFTTrainer(
        model=folder,
        args=SFTConfig(max_length=16, **settings),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def dpo():
    rows = dict(prompt=[text[:12] for text in texts], chosen=[text[12:24] for text in texts], rejected=texts[::-1])
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=DPOConfig(max_length=16, **settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def show(model):
    print(type(model.get_input_embeddings().weight).__name__, flush=True)


if kind == "accelerate":
    loop()
else:
    running = {"trainer": trainer, "sft": sft, "dpo": dpo}[kind]()
    show(running.model)
    running.train()
    if running.is_world_process_zero():
        for entry in running.state.log_history:
            if "loss" in entry:
                print(json.dumps({"loss": entry["loss"], "norm": entry["grad_norm"]}), flush=True)
    running.accelerator.wait_for_everyone()
    running.accelerator.end_training()
