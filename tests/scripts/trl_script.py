"""A TRL SFTTrainer script that never heard of expertmesh: real prose, a tokenizer trained on it, full or LoRA."""

import json
import os
import pydoc_data.topics
import sys

from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

output, lora = sys.argv[1], sys.argv[2] == "lora"
texts = [text[:400] for _, text in sorted(pydoc_data.topics.topics.items())][:32]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts, vocab_size=320, special_tokens=["<pad>", "<eos>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")
set_seed(0)
config = Qwen3MoeConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
    eos_token_id=1, bos_token_id=1, router_aux_loss_coef=0.0,  # the auxiliary loss is no mean over tokens
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
arguments = SFTConfig(
    output_dir=output,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    max_length=48,
    packing=True,
    packing_strategy="wrapped",
    logging_steps=1,
    learning_rate=1e-3,
    save_strategy="no",
    gradient_checkpointing=False,
    bf16=False,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    peft_config=adapter,
)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(json.dumps({"step": entry["step"], "loss": entry["loss"], "norm": entry["grad_norm"]}), flush=True)
trainer.accelerator.end_training()
