"""Writing the finished model, or its adapters, as an ordinary folder, and proving that stock libraries can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.checkpoint import Checkpoint
from expertmesh.errors import ModelError
from expertmesh.finetune.recipe import Recipe
from expertmesh.plugins import load_plugin
from expertmesh.ranks import world

_RELOAD = Path(__file__).with_name("reload.py")
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "NODE_RANK")
_ENGINE_VARIABLES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "FSDP_", "EXPERTMESH_")


def save_finished(recipe: Recipe, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights, configuration, generation settings and tokenizer, and put them into place in one step. Collective.

    Every rank writes its own shards; adapters, which are small, rank 0 writes, and the base model stays where it is.
    What else `output_dir` holds stays, checkpoints among it.

    Raises:
        CheckpointError: it could not be written; on every rank.
    """
    with Checkpoint(recipe.output_path) as finished:
        with agreed(f"write the tokenizer to {finished.folder}"):
            if world()[0] == 0:
                tokenizer.save_pretrained(finished.folder)
        if isinstance(model, PeftModel):
            load_plugin("peft").save_adapters(model, finished.folder)
        else:
            finished.add_model(model)
        finished.commit()


def check_in_stock_process(recipe: Recipe) -> str:
    """Reload the folder with stock Transformers (and PEFT) in a process without expertmesh; returns its sample.

    The weights stay where they are when this fails: a long training is not to be lost to its last check.

    Raises:
        ModelError: the folder does not load, or its weights are not exactly those the model has.
    """
    command = [sys.executable, "-P", _RELOAD, recipe.output_path, recipe.sample_prompt, str(recipe.sample_tokens)]
    if recipe.messages_column is not None:
        command.append("--chat")
    child = subprocess.run(command, env=stock_environment(os.environ), capture_output=True, text=True, check=False)
    if child.returncode:
        raise ModelError(
            f"the model in {str(recipe.output_dir)!r} was written, but stock {reader(recipe)} does not reload it; "
            f"the process said:\n{child.stderr.strip()}"
        )
    return child.stdout.strip()


def reader(recipe: Recipe) -> str:
    """The stock library that reads what the recipe leaves."""
    return "Transformers" if recipe.lora is None else "PEFT"


def stock_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a launcher put there, and with PyTorch's plugin autoload off."""
    launched = _LAUNCHER_VARIABLES + _ENGINE_VARIABLES
    kept = {name: value for name, value in environ.items() if not name.startswith(launched)}
    return {**kept, "EXPERTMESH_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
