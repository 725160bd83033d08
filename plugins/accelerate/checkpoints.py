"""`Accelerator.save_state` and `load_state` with expertmesh's checkpoints.

Models and optimizers are ours; schedulers, samplers, random states and registered objects are written and read by
Accelerate's own functions, in Accelerate's own files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state, save_custom_state
from accelerate.utils import RNG_STATE_NAME, SCALER_NAME, load
from accelerate.utils.constants import FSDP_MODEL_NAME
from expertmesh_plugins.accelerate.folders import folder_to_read, folder_to_write, retention
from torch import nn
from torch.optim import Optimizer

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.checkpoint import Checkpoint
from expertmesh.checkpoint.load import load_model
from expertmesh.checkpoint.manifest import MANIFEST, verify_files
from expertmesh.checkpoint.optimizer import load_optimizer
from expertmesh.errors import CheckpointError
from expertmesh.plugins import load_plugin


def save_state(
    original: Callable[..., Any],
    accelerator: Accelerator,
    output_dir: str | None = None,
    safe_serialization: bool = True,
    **save_model_func_kwargs: Any,
) -> str:
    """Write a checkpoint of everything the accelerator prepared. Collective.

    Takes what `Accelerator.save_state` takes; weights are always safetensors, so `safe_serialization` and what is meant
    for other engines' model files have no effect.

    Returns:
        The checkpoint's folder; with `ep_async_save` it appears there when the background has written it.

    Raises:
        CheckpointError: it could not be written; training can go on.
    """
    final = folder_to_write(accelerator, output_dir)
    config = accelerator.parallelism_config.expert_parallel
    prepared = _prepared(accelerator)
    with Checkpoint(final, asynchronous=config.ep_async_save, format=config.ep_checkpoint_format) as checkpoint:
        for part, model, optimizer in prepared:
            _add_model(checkpoint, model, part)
            if optimizer is not None:
                checkpoint.add_optimizer(model, optimizer, part)
        with agreed(f"write the training state into {checkpoint.folder}"):
            _save_the_rest(accelerator, checkpoint.folder)
        checkpoint.commit(mesh=config.mesh_sizes, after=retention(accelerator))
    accelerator.project_configuration.iteration += 1
    return str(final)


def load_state(
    original: Callable[..., None],
    accelerator: Accelerator,
    input_dir: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Read a checkpoint of any mesh into everything the accelerator prepared. Collective.

    Takes what `Accelerator.load_state` takes, and the checkpoints that Accelerate's FSDP2 wrote too.

    Raises:
        CheckpointError: it is not complete or damaged, does not fit, or holds an object that only unsafe unpickling
            could read.
    """
    folder = folder_to_read(accelerator, input_dir)
    if (folder / f"{FSDP_MODEL_NAME}.bin").is_file():
        # Accelerate's FULL_STATE_DICT: one file that only Accelerate knows how to spread.
        original(accelerator, str(folder), load_kwargs, **load_model_func_kwargs)
        return
    if (folder / MANIFEST).is_file():
        verify_files(folder)
    prepared = _prepared(accelerator)
    for part, model, _ in prepared:
        _load_model(model, folder, part)
    scaler = _load_scaler_first(accelerator, folder)
    for part, model, optimizer in prepared:
        if optimizer is not None:
            load_optimizer(model, optimizer, folder / part)
    with agreed(f"read the training state from {folder}"):
        _load_the_rest(accelerator, folder, scaler, load_kwargs, **load_model_func_kwargs)


def get_state_dict(
    original: Callable[..., Any], accelerator: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """`Accelerator.get_state_dict`, with the adapters of experts in the layout that PEFT saves. Collective."""
    state_dict = original(accelerator, model, *args, **kwargs)
    adapters = _adapters_of(accelerator.unwrap_model(model, keep_torch_compile=False))
    if adapters is None:
        return state_dict
    return {name: adapters.as_stored(name, tensor) for name, tensor in state_dict.items()}


def _prepared(accelerator: Accelerator) -> list[tuple[str, nn.Module, Optimizer | None]]:
    """The sub-folder of a checkpoint that is each model's, none for the first; the model; its optimizer."""
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(optimizers) > len(models):
        raise CheckpointError(
            f"{len(models)} models and {len(optimizers)} optimizers were prepared, but a checkpoint holds one "
            f"optimizer for each model: give all parameter groups of a model to one optimizer."
        )
    return [
        (
            f"model_{index}" if index else "",
            accelerator.unwrap_model(model, keep_torch_compile=False),
            # Accelerate's wrapper leaves out steps while gradients accumulate, but reading a state takes one.
            optimizers[index].optimizer if index < len(optimizers) else None,
        )
        for index, model in enumerate(models)
    ]


def _add_model(checkpoint: Checkpoint, model: nn.Module, part: str) -> None:
    adapters = _adapters_of(model)
    if adapters is None:
        checkpoint.add_model(model, part)
    else:
        adapters.save_adapters(model, checkpoint.folder / part)


def _load_model(model: nn.Module, folder: Path, part: str) -> None:
    adapters = _adapters_of(model)
    if adapters is not None and adapters.holds_adapters(folder / part):
        adapters.load_adapters(model, folder / part)
    else:
        load_model(model, folder, part)


def _adapters_of(model: nn.Module) -> ModuleType | None:
    """What reads and writes the model's PEFT adapters, if it has any."""
    if not hasattr(model, "get_base_model"):
        return None
    return load_plugin("peft")


def _save_the_rest(accelerator: Accelerator, folder: Path) -> None:
    on_each_node = accelerator.project_configuration.save_on_each_node
    # Micro-batches since the last optimizer step, which a resume with other accumulation must count anew.
    step = 0 if accelerator.sync_gradients else accelerator.step
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [], str(folder))
    save_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        step,
        accelerator.scaler,
        save_on_each_node=on_each_node,
    )
    for index, registered in enumerate(accelerator._custom_objects):
        save_custom_state(registered, str(folder), index, save_on_each_node=on_each_node)


def _load_scaler_first(accelerator: Accelerator, folder: Path) -> Any:
    """With FSDP2, load the gradient scaler, which loading the optimizer makes use of; otherwise return it for later."""
    if accelerator.scaler is None or not accelerator.is_fsdp2:
        return accelerator.scaler
    accelerator.scaler.load_state_dict(torch.load(folder / SCALER_NAME, weights_only=True))
    accelerator.scaler._lazy_init_scale_growth_tracker(accelerator.scaler._device)
    return None


def _load_the_rest(
    accelerator: Accelerator, folder: Path, scaler: Any, load_kwargs: dict[str, Any] | None, **others: Any
) -> None:
    for hook in accelerator._load_model_state_pre_hook.values():
        hook([], str(folder))
    map_location = others.pop("map_location", None) or ("on_device" if accelerator.multi_device else "cpu")
    attributes = load_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        scaler,
        map_location,
        load_kwargs,
    )
    # A rank that the saving run did not have finds no random states of its own, but accumulates like the others.
    accelerator.step = attributes["step"] if "step" in attributes else _random_states(folder, 0)["step"]
    _load_registered(accelerator, folder)


def _random_states(folder: Path, rank: int) -> dict[str, Any]:
    return load(folder / f"{RNG_STATE_NAME}_{rank}.pkl")


def _load_registered(accelerator: Accelerator, folder: Path) -> None:
    stored = [path for path in folder.iterdir() if re.fullmatch(r"custom_checkpoint_\d+\.pkl", path.name)]
    registered = accelerator._custom_objects
    if len(stored) != len(registered):
        raise CheckpointError(
            f"{folder} holds {len(stored)} registered objects, but {len(registered)} are registered for checkpointing: "
            f"register the same objects, in the same order, as the run that saved."
        )
    for index, target in enumerate(registered):
        path = folder / f"custom_checkpoint_{index}.pkl"
        try:
            state = load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{path}, the state of {type(target).__name__}, holds objects that only unsafe unpickling could read, "
                f"which a checkpoint is never trusted with: let its state_dict() return tensors, numbers, texts, lists "
                f"and dicts only. ({str(error).splitlines()[0]})"
            ) from None
        target.load_state_dict(state)
