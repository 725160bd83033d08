"""PEFT adapters of a sharded model, to and from the adapter folder that PEFT itself writes.

A checkpoint of a `PeftModel` holds its adapters and not its frozen base. Checked on peft 0.21.2.
"""

from __future__ import annotations

from pathlib import Path

import torch
from expertmesh_plugins.peft.experts import as_stored, by_expert, stored_shape
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.shards import LocalShard
from expertmesh.errors import CheckpointError, some
from expertmesh.ranks import gather, world


def save_adapters(model: PeftModel, folder: Path) -> None:
    """Write every adapter the way `PeftModel.save_pretrained(folder)` does in one process. Collective.

    Only the adapters' own tensors are gathered, one at a time.

    Raises:
        CheckpointError: rank 0 could not write.
    """
    rank, _ = world()
    stored = model.state_dict()
    # PEFT may ask the Hub which tensors belong to an adapter, and one rank's answer must do for all.
    names = gather(_adapter_tensors(model, stored) if rank == 0 else None)[0]
    whole = {name: _whole(name, stored[name], keep=rank == 0) for name in names}
    with agreed(f"write the adapters into {folder}"):
        if rank == 0:
            model.save_pretrained(str(folder), state_dict=whole)


def holds_adapters(folder: Path) -> bool:
    """Whether `folder` is what `save_adapters` writes."""
    return any(folder.glob(SAFETENSORS_WEIGHTS_NAME)) or any(folder.glob(f"*/{SAFETENSORS_WEIGHTS_NAME}"))


def load_adapters(model: PeftModel, folder: Path) -> None:
    """Read every adapter of `model` from `folder` into its parameters, sharded or not. Collective.

    Raises:
        CheckpointError: a tensor that the file lacks, that the model does not have, or of another shape, by name.
    """
    for adapter in model.peft_config:
        path = (folder if adapter == "default" else folder / adapter) / SAFETENSORS_WEIGHTS_NAME
        # Each value is, or is a view of, a parameter's own memory.
        parameters = get_peft_model_state_dict(model, state_dict=model.state_dict(), adapter_name=adapter)
        with agreed(f"read the adapter {path}"), safe_open(path, "pt") as stored, torch.no_grad():
            _refuse_differences(path, stored, parameters)
            for name, parameter in parameters.items():
                whole = by_expert(name, stored.get_tensor(name), parameter)
                shard = LocalShard.of(parameter)
                shard.tensor.copy_(whole[shard.box.slices])


def _adapter_tensors(model: PeftModel, stored: dict[str, Tensor]) -> list[str]:
    """The names in the model's state dict of what PEFT would save."""
    chosen = set()
    for adapter in model.peft_config:
        selected = get_peft_model_state_dict(model, state_dict=dict(stored), adapter_name=adapter)
        chosen |= {id(tensor) for tensor in selected.values()}
    return [name for name, tensor in stored.items() if id(tensor) in chosen]


def _whole(name: str, tensor: Tensor, keep: bool) -> Tensor | None:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return as_stored(name, whole.cpu()) if keep else None


def _refuse_differences(path: Path, stored: safe_open, parameters: dict[str, Tensor]) -> None:
    shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    wanted = {name: stored_shape(name, tensor) for name, tensor in parameters.items()}
    differences = [f"{name} is missing" for name in sorted(wanted.keys() - shapes.keys())]
    differences += [f"{name} is not in the model" for name in sorted(shapes.keys() - wanted.keys())]
    differences += [
        f"{name} is of shape {shapes[name]} instead of {wanted[name]}"
        for name in sorted(wanted.keys() & shapes.keys())
        if wanted[name] != shapes[name]
    ]
    if differences:
        raise CheckpointError(
            f"{path} does not fit the model's adapter: {some(differences)}: "
            f"resume with the LoraConfig that the checkpoint was trained with."
        )
