"""Giving a model the loss that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from expertmesh.config import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.loss.chunked import linear_cross_entropy
from expertmesh.plugins import load_plugin


def take_loss_without_logits(model: nn.Module, config: ExpertParallelConfig, device: torch.device) -> None:
    """Let a model's language models take their loss from hidden states, before or after they are sharded.

    Args:
        model: the whole model, as it is called; one that was changed before is left alone.
        config: what is asked for.
        device: where the loss will be computed.

    Raises:
        ConfigError: `ep_loss` is `liger`, and Liger cannot be used here.
    """
    compute = _choose(config.ep_loss, device)
    if compute is not None:
        import_module(f"{load_plugin('transformers').__name__}.loss").take_loss_without_logits(model, compute)


def _choose(name: str, device: torch.device) -> Callable[..., Tensor] | None:
    if name == "hf":
        return None
    has_liger = find_spec("liger_kernel") is not None
    if name == "liger" and not (has_liger and device.type == "cuda"):
        raise ConfigError(
            f"ep_loss liger needs CUDA and the package liger-kernel, and here is {device.type} "
            f"{'with' if has_liger else 'without'} it: install `expertmesh[liger]` on a GPU, or set ep_loss to auto."
        )
    if name == "liger" or (name == "auto" and has_liger and device.type == "cuda"):
        return load_plugin("liger").linear_cross_entropy
    return linear_cross_entropy
