"""A TRL SFTTrainer script. SFTTrainer overrides `_save_checkpoint`. Prints the losses as a JSON line.

The second argument is `full-disk`: nothing large can be written after the first save; or `resume`: from the newest.
"""

import json
import os
import resource
import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

output, mode = sys.argv[1:]
words = [f"w{number}" for number in range(90)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
texts = [" ".join(words[(7 * row + 3 * column) % 90] for column in range(12)) for row in range(32)]


class FillDisk(TrainerCallback):
    def on_save(self, arguments, state, control, **_):
        if mode == "full-disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


set_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
    eos_token_id=1, bos_token_id=1, router_aux_loss_coef=0.0,  # the auxiliary loss is no mean over tokens
)  # fmt: skip
arguments = SFTConfig(
    output_dir=output,
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=4,
    save_steps=2,
    save_total_limit=1,
    logging_steps=1,
    learning_rate=1e-2,
    gradient_checkpointing=False,
    bf16=False,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=Qwen3MoeForCausalLM(config),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[FillDisk()],
)
trainer.train(resume_from_checkpoint=mode == "resume")
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"losses": losses}), flush=True)
trainer.accelerator.wait_for_everyone()
trainer.end()
