"""Between the tensors of a checkpoint and those of a model: Transformers' own conversion, followed instead of run.

`trace_load` and `trace_save` call the functions that `from_pretrained` and `save_pretrained` call, on tensors without
elements. What comes out tells for each element of each tensor where it belongs on the other side, as if the whole
tensor had been converted, so that every rank can read and write its own part alone. Where a conversion computes (an
opaque tensor), it is run for real on whole tensors.

Uses functions of Transformers that are not public, checked on 5.24.0: `convert_and_load_state_dict_in_model`,
`revert_weight_conversion`, `get_model_conversion_mapping`, `LoadStateDictConfig`, and two methods of `PreTrainedModel`
that `from_pretrained` calls behind them (`tie_weights` with arguments, `_adjust_missing_and_unexpected_keys`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from expertmesh.checkpoint.safetensors_format import StoredTensor
from expertmesh.checkpoint.shards import original_class, tensors_to_save, unwrapped
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError, some

# Gives, for whole source tensors by their stored names, the model's tensors that are made of them.
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_TRACES: WeakKeyDictionary[nn.Module, tuple[tuple, dict[str, Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LoadPlan:
    """Where a model's tensors are to be read.

    Attributes:
        tensors: for each name of the model what it is made of, in the dtype that loading gives it.
        stored: the files' tensors by their stored names.
        convert: runs the conversion for real, for those that are opaque.
        missing: names of the model that no file has anything for.
        unexpected: stored names that the model has no place for.
        misshapen: name, stored shape and the model's shape where these differ.
        unconvertible: names of the model whose stored tensors do not fit each other.
    """

    tensors: Mapping[str, TracedTensor]
    stored: Mapping[str, StoredTensor]
    convert: Convert
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    unconvertible: tuple[str, ...] = ()

    def refuse_other_tensors(self, folder: Path) -> None:
        """Refuse files that have not exactly the model's tensors.

        Raises:
            CheckpointError: lists the first names of each kind.
        """
        misshapen = [f"{name} (stored {list(found)}, model {list(own)})" for name, found, own in self.misshapen]
        kinds = {
            "missing": self.missing,
            "not in the model": self.unexpected,
            "of another shape": misshapen,
            "made of tensors that do not fit each other": self.unconvertible,
        }
        wrong = [f"{len(names)} {kind}: {some(names)}" for kind, names in kinds.items() if names]
        if wrong:
            raise CheckpointError(
                f"the weights in {folder} are not those of this model; {'; '.join(wrong)}. Resume with the model that "
                f"wrote the checkpoint, or start from it with from_pretrained."
            )


def trace_sources(stored: Mapping[str, StoredTensor]) -> dict[str, TracedTensor]:
    """The files' tensors, ready to be followed."""
    return {name: TracedTensor.of(name, tensor.shape, tensor.dtype) for name, tensor in stored.items()}


def trace_load(model: nn.Module, stored: Mapping[str, StoredTensor]) -> LoadPlan:
    """How a model, however sharded, is read from files. Nothing is read and the model is not touched.

    A model that is not Transformers' is read by its own names.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        return _trace_by_name(model, stored)
    skeleton = _skeleton(model)
    loading = _convert(skeleton, trace_sources(stored))
    skeleton.tie_weights(missing_keys=loading.missing_keys, recompute_mapping=False)
    skeleton._adjust_missing_and_unexpected_keys(loading)
    tensors = skeleton.state_dict(keep_vars=True)

    def convert(sources: dict[str, Tensor]) -> dict[str, Tensor]:
        filled = _skeleton(model)
        _convert(filled, sources)
        return {name: tensor for name, tensor in filled.state_dict().items() if not tensor.is_meta}

    return LoadPlan(
        tensors={name: tensor for name, tensor in tensors.items() if isinstance(tensor, TracedTensor)},
        stored=stored,
        convert=convert,
        missing=tuple(sorted(loading.missing_keys - loading.conversion_errors.keys())),
        unexpected=tuple(sorted(loading.unexpected_keys)),
        misshapen=tuple(sorted((name, tuple(found), tuple(own)) for name, found, own in loading.mismatched_keys)),
        unconvertible=tuple(sorted(loading.conversion_errors)),
    )


def trace_save(model: nn.Module) -> dict[str, TracedTensor]:
    """What a model's checkpoint holds: every tensor under its stored name, made of the model's tensors."""
    model = unwrapped(model)
    own = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_to_save(model).items())
    # Seconds for a model with many experts, and the same at every save.
    known, traced = _TRACES.get(model, (None, {}))
    if known != own:
        traced = revert(model, {name: TracedTensor.of(name, shape, dtype) for name, shape, dtype in own})
        _TRACES[model] = (own, traced)
    return traced


def revert(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors under their stored names and in their stored layout."""
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        return tensors
    if isinstance(model, FSDPModule) and not hasattr(model, "_weight_conversions"):
        # To Transformers a class that FSDP2 made is somebody else's code, to which its conversions do not apply.
        model = _skeleton(model)
    return revert_weight_conversion(model, tensors)


def _trace_by_name(model: nn.Module, stored: Mapping[str, StoredTensor]) -> LoadPlan:
    own = {name: tuple(tensor.shape) for name, tensor in tensors_to_save(model).items()}
    return LoadPlan(
        tensors={name: tensor for name, tensor in trace_sources(stored).items() if name in own},
        stored=stored,
        convert=lambda sources: sources,
        missing=tuple(sorted(own.keys() - stored.keys())),
        unexpected=tuple(sorted(stored.keys() - own.keys())),
        misshapen=tuple(
            (name, stored[name].shape, own[name])
            for name in sorted(own.keys() & stored.keys())
            if stored[name].shape != own[name]
        ),
    )


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture without weights."""
    with torch.device("meta"), torch.random.fork_rng(devices=()):
        return original_class(model)(copy.deepcopy(model.config))


def _convert(model: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> object:
    load_config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    with _without_progress_bar():
        loading, _ = convert_and_load_state_dict_in_model(model, state_dict, load_config)
    return loading


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Transformers draws one while it converts; nothing is read here that a user would wait for."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
