"""The model that a configuration describes, without weights: what asks it needs its names and shapes only."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from expertmesh.errors import CheckpointError


def read_config(folder: Path) -> PreTrainedConfig:
    """A folder's `config.json`. Code that comes with a model is not run.

    Raises:
        CheckpointError: there is none, or Transformers does not know its kind of model.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no configuration to read: {' '.join(str(error).split())}") from error


def model_without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device.

    Raises:
        CheckpointError: the configuration names no model class that Transformers has.
    """
    name = next(iter(config.architectures or ()), None)
    model_class = getattr(transformers, name or "", None)
    if model_class is None:
        raise CheckpointError(f"the configuration names the model class {name}, which this Transformers does not have.")
    with torch.device("meta"):
        return model_class(config)
