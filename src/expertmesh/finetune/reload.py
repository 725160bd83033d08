"""Run as a script, in a process of its own: read a saved model, or adapters, with stock libraries and print a sample.

Nothing of expertmesh may be imported here, which is why this file is never imported as a module of it.

usage: reload.py FOLDER PROMPT TOKENS [--chat]
"""

import sys
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def main(folder: str, prompt: str, tokens: str, *chat: str) -> None:
    """Exit with a message if weights are missing, left over or misshapen; otherwise print the prompt's continuation."""
    adapters = Path(folder, SAFETENSORS_WEIGHTS_NAME)
    model = load_adapted(folder, adapters) if adapters.is_file() else load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    torch.manual_seed(0)
    generated = model.generate(**inputs, max_new_tokens=int(tokens), do_sample=True, temperature=0.7)
    ours = [name for name in sys.modules if name.startswith("expertmesh")]
    if ours:
        sys.exit(f"this was no stock process: {ours} were imported")
    print(tokenizer.decode(generated[0], skip_special_tokens=True))


def load(folder: str) -> PreTrainedModel:
    """A model whose weights are all in the folder, and nothing else."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: names for kind, names in loading.items() if names}
    if wrong:
        sys.exit(f"the saved weights are not those of {type(model).__name__}: {wrong}")
    return model


def load_adapted(folder: str, adapters: Path) -> PeftModel:
    """The base model with adapters that are all in the file, and nothing else."""
    base = load(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    model = PeftModel.from_pretrained(base, folder)
    with safe_open(adapters, "pt") as stored:
        wrong = get_peft_model_state_dict(model).keys() ^ set(stored.keys())
    if wrong:
        sys.exit(f"the saved adapters are not those of {type(base).__name__}: {sorted(wrong)}")
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
