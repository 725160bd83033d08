"""Checkpoints that are ordinary Hugging Face models and that any mesh can resume."""

from expertmesh.checkpoint.checkpoint import Checkpoint, save_model, wait_for_checkpoints
from expertmesh.checkpoint.load import load_model
from expertmesh.checkpoint.optimizer import load_optimizer
from expertmesh.checkpoint.publish import latest

__all__ = ["Checkpoint", "latest", "load_model", "load_optimizer", "save_model", "wait_for_checkpoints"]
