"""`transformers.Trainer` (and what derives from it, like TRL's trainers) with expertmesh's checkpoints.

Monkey-patches of methods of `transformers.Trainer`, checked on transformers 5.24.0 and covered by
tests/test_checkpoint_trainer.py. Trainers whose accelerator has no expert-parallel configuration go the original way.

- `train`: finds the checkpoint to resume from among the complete ones, and reports what an ended save left behind.
- `_save_checkpoint`: the original writes into a staging folder, which becomes `checkpoint-N` when it is complete; only
  then are older checkpoints removed and the new one pushed. `_get_output_dir` and `_push_from_checkpoint` help with it.
- `save_model`, `_save_optimizer_and_scheduler`: written from the shards by all ranks.
- `_load_from_checkpoint`, `_load_best_model`, `_load_optimizer_and_scheduler`: read into the shards, of any mesh or of
  one process; where the original leaves what it cannot place at its old value, this is an error.
- `_finalize_training`: first waits for a checkpoint that is written in the background.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from expertmesh_plugins.patching import divert
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.checkpoint import Checkpoint, save_model, wait_for_checkpoints
from expertmesh.checkpoint.load import load_model
from expertmesh.checkpoint.manifest import MANIFEST, verify_files
from expertmesh.checkpoint.optimizer import OptimizerStage, load_optimizer
from expertmesh.checkpoint.publish import incomplete, resolve
from expertmesh.errors import CheckpointError
from expertmesh.plugins import load_plugin
from expertmesh.ranks import world

logger = logging.getLogger(__name__)

# The checkpoint that a trainer is writing at the moment, as an attribute of the trainer.
_UNDER_WAY = "_expertmesh_checkpoint"


def patch_trainer() -> None:
    """Apply the patches, if they are not there yet."""
    for name, ours in {
        "train": _train,
        "_get_output_dir": _output_dir,
        "_save_checkpoint": _save_checkpoint,
        "_push_from_checkpoint": _push_from_checkpoint,
        "save_model": _save_model,
        "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
        "_load_from_checkpoint": _load_from_checkpoint,
        "_load_best_model": _load_best_model,
        "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
        "_finalize_training": _finalize_training,
    }.items():
        divert(Trainer, name, ours, _is_ours)


def _is_ours(trainer: Trainer) -> bool:
    return hasattr(trainer.accelerator.parallelism_config, "expert_parallel")


# Saving.


def _save_checkpoint(original: Callable[..., None], trainer: Trainer, model: nn.Module, trial: Any) -> None:
    config = trainer.accelerator.parallelism_config.expert_parallel
    run = Path(trainer._get_output_dir(trial))
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    # What is pushed must be there: with pushes a checkpoint is not left to the background.
    asynchronous = config.ep_async_save and not trainer.args.push_to_hub
    with Checkpoint(run / name, name, asynchronous=asynchronous, format=config.ep_checkpoint_format) as checkpoint:
        setattr(trainer, _UNDER_WAY, checkpoint)
        try:
            with agreed(f"write the checkpoint {run / name}"):
                original(trainer, model, trial)
                _note_best(trainer, run, checkpoint.folder / name)
        finally:
            delattr(trainer, _UNDER_WAY)
        after = partial(_rotate, trainer.args, run, trainer.state.best_model_checkpoint)
        checkpoint.commit(step=trainer.state.global_step, mesh=config.mesh_sizes, after=after)
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(run / name))


def _under_way(trainer: Trainer) -> Checkpoint | None:
    return getattr(trainer, _UNDER_WAY, None)


def _output_dir(original: Callable[..., str], trainer: Trainer, trial: Any) -> str:
    checkpoint = _under_way(trainer)
    return original(trainer, trial) if checkpoint is None else str(checkpoint.folder)


def _push_from_checkpoint(original: Callable[..., None], trainer: Trainer, checkpoint_folder: str) -> None:
    if _under_way(trainer) is None:
        original(trainer, checkpoint_folder)


def _note_best(trainer: Trainer, run: Path, staged: Path) -> None:
    """Say in the trainer's state where the best checkpoint will be; the original looked into the staging folder."""
    state = trainer.state
    if not state.best_global_step:
        return
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if name == staged.name or (run / name).is_dir():
        state.best_model_checkpoint = str(run / name)
    if trainer.args.should_save:
        state.save_to_json(str(staged / TRAINER_STATE_NAME))


def _rotate(arguments: TrainingArguments, run: Path, best: str | None) -> None:
    if not arguments.save_total_limit:
        return
    # The original would count what an ended save left behind as a checkpoint.
    for leftover in incomplete(run):
        shutil.rmtree(leftover, ignore_errors=True)
    rotate_checkpoints(str(run), arguments.save_total_limit, best_model_checkpoint=best, use_mtime=True)


def _save_model(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    folder = Path(trainer.args.output_dir if output_dir is None else output_dir)
    checkpoint = _under_way(trainer)
    model = _model(trainer)
    if isinstance(model, PeftModel):
        load_plugin("peft").save_adapters(model, folder)
    elif checkpoint is not None and folder.parent == checkpoint.folder:
        checkpoint.add_model(model)
    else:
        save_model(model, folder)
    with agreed(f"write the tokenizer and the training arguments into {folder}"):
        if trainer.args.should_save:
            _save_companions(trainer, folder)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _save_companions(trainer: Trainer, folder: Path) -> None:
    """What `Trainer._save` puts beside the model."""
    folder.mkdir(parents=True, exist_ok=True)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(str(folder))
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


def _save_optimizer_and_scheduler(original: Callable[..., None], trainer: Trainer, output_dir: str) -> None:
    checkpoint = _under_way(trainer)
    if checkpoint is not None:
        checkpoint.add_optimizer(_model(trainer), _optimizer(trainer))
    else:
        OptimizerStage(_model(trainer), _optimizer(trainer), copy=False).write(Path(output_dir, "optimizer"), None)
    with agreed(f"write the scheduler into {output_dir}"):
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))


def _finalize_training(original: Callable[..., Any], trainer: Trainer, *arguments: Any, **options: Any) -> Any:
    wait_for_checkpoints()
    return original(trainer, *arguments, **options)


# Loading.


def _train(
    original: Callable[..., Any],
    trainer: Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    if resume_from_checkpoint:
        newest = resume_from_checkpoint is True
        folder = _newest(Path(trainer.args.output_dir)) if newest else resolve(Path(resume_from_checkpoint))
        if trainer.is_world_process_zero():
            _report_leftovers(folder.parent)
        if (folder / MANIFEST).is_file():
            verify_files(folder)
        resume_from_checkpoint = str(folder)
    return original(trainer, resume_from_checkpoint, *arguments, **options)


def _newest(run: Path) -> Path:
    """The complete checkpoint with the highest step, be it ours or another program's."""
    names = {path.name.removesuffix(".replaced") for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()}
    steps = [int(step) for name in names if (step := name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")).isdecimal()]
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {run}: start without resume_from_checkpoint.")
    return resolve(run / f"{PREFIX_CHECKPOINT_DIR}-{max(steps)}")


def _report_leftovers(run: Path) -> None:
    for path in incomplete(run):
        logger.warning("expertmesh: %s was left by a save that did not end, and is ignored.", path)


def _load_from_checkpoint(
    original: Callable[..., None],
    trainer: Trainer,
    resume_from_checkpoint: str,
    model: nn.Module | None = None,
) -> None:
    folder = Path(resume_from_checkpoint)
    if (folder / "pytorch_model_fsdp.bin").is_file() and not any(folder.glob("model*.safetensors")):
        # Accelerate's FULL_STATE_DICT: one file that only Accelerate knows how to spread.
        original(trainer, resume_from_checkpoint, model)
    else:
        _load_weights(trainer, model, folder)


def _load_best_model(original: Callable[..., None], trainer: Trainer) -> None:
    _load_weights(trainer, None, Path(trainer.state.best_model_checkpoint))


def _load_weights(trainer: Trainer, model: nn.Module | None, folder: Path) -> None:
    target = _model(trainer, model)
    adapters = load_plugin("peft") if isinstance(target, PeftModel) else None
    if adapters is not None and adapters.holds_adapters(folder):
        adapters.load_adapters(target, folder)
    else:
        load_model(target, folder)


def _load_optimizer_and_scheduler(original: Callable[..., None], trainer: Trainer, checkpoint: str | None) -> None:
    if checkpoint is None:
        return
    folder = Path(checkpoint)
    if not any((folder / name).is_dir() for name in ("optimizer", "optimizer_0")):
        _load_foreign_optimizer(original, trainer, folder)
        return
    load_optimizer(_model(trainer), _optimizer(trainer), folder)
    with agreed(f"read the scheduler from {folder}"):
        trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))


def _load_foreign_optimizer(original: Callable[..., None], trainer: Trainer, folder: Path) -> None:
    """An optimizer state that we did not write, or none, which `save_only_model` leaves out."""
    if (folder / "optimizer.pt").is_file() and trainer.is_fsdp_enabled:
        raise CheckpointError(
            f"{folder / 'optimizer.pt'} was written by one process without FSDP and cannot be spread over "
            f"{world()[1]} processes: remove it to go on with a fresh optimizer, or resume in one process."
        )
    if not any(folder.glob("optimizer.*")) and trainer.is_world_process_zero():
        logger.warning("expertmesh: %s holds no optimizer state: the optimizer starts afresh.", folder)
    original(trainer, str(folder))


def _model(trainer: Trainer, model: nn.Module | None = None) -> nn.Module:
    """The model itself, without what DDP or `torch.compile` put around it."""
    return trainer.accelerator.unwrap_model(trainer.model if model is None else model, keep_torch_compile=False)


def _optimizer(trainer: Trainer) -> Optimizer:
    # Accelerate's wrapper leaves out steps while gradients accumulate, but reading a state takes one.
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)
