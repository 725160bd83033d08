"""Transformers' own way from files to a model, run on tensors without elements.

Names, missing and unexpected keys, mismatched shapes, dtypes and the conversions noted for saving come out as they
always do; the traced tensors that end up in the model are then replaced by deferred parameters. See
`expertmesh.checkpoint.deferred`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from expertmesh.checkpoint.conversion import LoadPlan, trace_sources
from expertmesh.checkpoint.deferred import DeferredLoad
from expertmesh.checkpoint.deferred_tensor import DeferredParameter
from expertmesh.checkpoint.safetensors_format import StoredTensor, read_header
from expertmesh.checkpoint.shards import original_class
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.experts import is_experts

Load = Callable[..., tuple[Any, Any]]


def load_deferred(
    original: Load, model: PreTrainedModel, checkpoint_files: Sequence[str], load_config: Any
) -> tuple[Any, Any] | None:
    """Load without reading.

    Args:
        original: `PreTrainedModel._load_pretrained_model` as Transformers defines it; the rest are its arguments.

    Returns:
        What `original` returns. None, with the model as it was, where this is no ordinary load or where the conversion
        does not run on traced tensors.
    """
    if not _is_ordinary(model, checkpoint_files, load_config):
        return None
    stored: dict[str, StoredTensor] = {}
    for file in checkpoint_files:
        stored.update(read_header(Path(file).absolute()))
    before = dict(_own_tensors(model))
    with _without_progress_bar():
        loaded = original(model, trace_sources(stored), None, load_config)
    traced = {slot: tensor for slot, tensor in _own_tensors(model) if isinstance(tensor, TracedTensor)}
    if loaded[0].conversion_errors:
        for (module, name), _ in traced.items():
            setattr(module, name, before[module, name])
        return None
    names = _names(model)
    plan = LoadPlan(
        tensors={names[slot]: tensor for slot, tensor in traced.items()},
        stored=stored,
        convert=functools.partial(_convert, original, original_class(model), model.config, load_config),
    )
    load = DeferredLoad(plan)
    for (module, name), tensor in traced.items():
        setattr(module, name, _stand_in(load, names[module, name], tensor))
    return loaded


def _is_ordinary(model: PreTrainedModel, checkpoint_files: Sequence[str], load_config: Any) -> bool:
    return (
        all(str(file).endswith(".safetensors") for file in checkpoint_files)
        and load_config.hf_quantizer is None
        and set(map(str, (load_config.device_map or {"": "cpu"}).values())) == {"cpu"}
        and any(is_experts(module) for module in model.modules())
        and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def _stand_in(load: DeferredLoad, name: str, traced: TracedTensor) -> Tensor:
    """What takes a traced tensor's place: a deferred parameter, or the tensor itself if it is small or a buffer."""
    source = load.source(name)
    if isinstance(traced, nn.Parameter) and traced.numel() > 1:
        tensor: Tensor = DeferredParameter(source, requires_grad=traced.requires_grad)
    else:
        tensor = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        source.read_into(tensor)
        if isinstance(traced, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=traced.requires_grad)
    # Without it Transformers would initialise the weight at random.
    tensor._is_hf_initialized = True
    return tensor


def _convert(
    original: Load,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    load_config: Any,
    sources: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Run the conversion for real, on whole source tensors, into a model that has no weights otherwise."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(load_config.dtype or previous)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            skeleton = model_class(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(previous)
    with _without_progress_bar():
        original(skeleton, sources, None, load_config)
    return {name: tensor for name, tensor in skeleton.state_dict().items() if not tensor.is_meta}


def _own_tensors(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Every parameter and buffer by the module and attribute that hold it."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (module, name), tensor


def _names(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    return {
        (module, name): f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)
    }


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Transformers draws one while it loads, and nothing that a user would wait for is read here."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
