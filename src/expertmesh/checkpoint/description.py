"""The small files that make a folder of weights a Hugging Face model: configuration, generation settings, own code."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from expertmesh.checkpoint.shards import original_class, unwrapped


def write_description(model: nn.Module, folder: Path) -> None:
    """Write what `save_pretrained` writes beside the weights. On one rank; nothing for a model of another library."""
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [original_class(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
