"""Run as a script, in a process of its own: read a saved model with stock Transformers and print a sample of it.

Nothing of expertmesh may be imported here, which is why this file is never imported as a module of it.

usage: reload.py FOLDER PROMPT TOKENS [--chat]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, prompt: str, tokens: str, *chat: str) -> None:
    """Exit with a message if weights are missing, left over or misshapen; otherwise print the prompt's continuation."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: names for kind, names in loading.items() if names}
    if wrong:
        sys.exit(f"the saved weights are not those of {type(model).__name__}: {wrong}")
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


if __name__ == "__main__":
    main(*sys.argv[1:])
