"""A saved PEFT adapter, ready to be merged into its base model tensor by tensor.

PEFT itself builds its modules around a base without weights, and loads the adapter into them, so ranks, scalings and
names are PEFT's own. It also merges, one module at a time; only of stacked experts no more is computed than asked for.
Checked on peft 0.21.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from packaging.version import Version
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertmesh.checkpoint.boxes import Box
from expertmesh.errors import CheckpointError, some

ADAPTER = "default"
# Initialisations that leave the base model's weights alone.
_PLAIN_INITIALISATIONS = ("gaussian", "orthogonal", "eva")
_NOT_MERGED = ("layer_replication", "trainable_token_indices", "use_qalora", "lora_bias", "megatron_config")
_MERGED_VARIANTS = (DoraLinearVariant, DoraEmbeddingVariant)
# Until then A and B of stacked experts had the other's input and output.
_FIRST_UNSWAPPED = Version("0.19")


def base_of(folder: Path) -> tuple[str | None, str | None]:
    """The base model's name or path, and its revision on the Hub, that an adapter was saved with.

    Raises:
        CheckpointError: the folder's configuration cannot be read.
    """
    config = _read_json(folder)
    return config.get("base_model_name_or_path"), config.get("revision")


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put a saved LoRA adapter around a model without weights. The adapter's own tensors are loaded, on the CPU.

    Args:
        model: on the meta device; its modules are wrapped.
        folder: has `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        CheckpointError: it is no LoRA, has parts that cannot be merged into weights, or does not fit the model.
    """
    config = _mergeable_config(folder)
    stored = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    with _refusals_in_one_line(folder, model):
        adapted = PeftModel(model, config, ADAPTER, low_cpu_mem_usage=True)
    _refuse_layers(adapted, folder)
    doubt = _doubtful_layout(adapted, folder)
    loaded = _give_memory(adapted, stored)
    with _refusals_in_one_line(folder, model, doubt):
        result = set_peft_model_state_dict(adapted, stored, ADAPTER)
    missing = sorted(loaded & set(result.missing_keys))
    if missing or result.unexpected_keys:
        lines = [f"missing: {some(missing)}"] if missing else []
        lines += [f"not in the model: {some(sorted(result.unexpected_keys))}"] if result.unexpected_keys else []
        raise CheckpointError(
            f"the adapter in {folder} does not fit {type(model).__name__}; {'; '.join(lines)}. {_OTHER_BASE}"
        )
    return adapted.eval()


class PeftAdaptation:
    """See `expertmesh.checkpoint.merged_stream.Adaptation`.

    Equals `merge_and_unload()` to the last bit for all that PEFT merges, and for stacked experts up to the order in
    which the products of the `r` summands of an element are added.

    Args:
        model: what `load_adapter` returns.

    Raises:
        CheckpointError: it replaces one of two weights that are tied.
    """

    def __init__(self, model: PeftModel) -> None:
        base = model.get_base_model()
        self._mergers = dict(_mergers(base))
        saved = dict(_saved_modules(base))
        _refuse_untying(base, saved)
        self._replaced = dict(_trained_base(base)) | saved
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._replaced.items()}
        self.shapes |= {name: merger.shape for name, merger in self._mergers.items()}
        self.indivisible = frozenset(name for name, merger in self._mergers.items() if isinstance(merger, _Layer))

    @torch.no_grad()
    def merge(self, name: str, box: Box, weight: Tensor) -> Tensor:
        """See `Adaptation.merge`."""
        if name in self._replaced:
            weight = self._replaced[name][box.slices].to(weight.dtype)
        return self._mergers[name].merge(box, weight) if name in self._mergers else weight


class _Merger(Protocol):
    """How one parameter is merged.

    Attributes:
        shape: of the parameter.
    """

    shape: tuple[int, ...]

    def merge(self, box: Box, weight: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Layer:
    """A weight that PEFT merges as a whole."""

    layer: LoraLayer
    parameter: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.layer.get_base_layer(), self.parameter).shape)

    def merge(self, box: Box, weight: Tensor) -> Tensor:
        owner = self.layer.get_base_layer()
        without_elements = getattr(owner, self.parameter)
        setattr(owner, self.parameter, nn.Parameter(weight, requires_grad=False))
        self.layer.merge()
        merged = getattr(owner, self.parameter).detach()
        setattr(owner, self.parameter, without_elements)
        self.layer.merged_adapters.clear()
        return merged


@dataclass(frozen=True)
class _Stack:
    """A stack of experts' weights: `[E, out, in]`, or `[E, in, out]` where PEFT calls the experts transposed."""

    wrapper: ParamWrapper

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.wrapper.get_param().shape)

    def merge(self, box: Box, weight: Tensor) -> Tensor:
        experts, rows, columns = box.slices
        out_first = self.wrapper._did_swap_in_out_features
        out, into = (rows, columns) if out_first else (columns, rows)
        a, b = self.wrapper.lora_A[ADAPTER].weight, self.wrapper.lora_B[ADAPTER].weight
        a = a.reshape(self.wrapper.num_experts, -1, a.shape[-1])[experts, :, into]
        b = b.reshape(b.shape[0], -1, self.wrapper.num_experts)[out, :, experts]
        # The same contraction and casts as `ParamWrapper.get_delta_weight` and `merge`.
        equation = "o r e, e r i -> e o i" if out_first else "o r e, e r i -> e i o"
        delta = torch.einsum(equation, b, a) * self.wrapper.scaling[ADAPTER]
        return weight + delta.to(weight.dtype)


def _mergers(base: nn.Module) -> Iterator[tuple[str, _Merger]]:
    for name, module in base.named_modules():
        if isinstance(module, ParamWrapper):
            stacked = module.get_param().ndim > 2
            merger = _Stack(module) if stacked else _Layer(module, module.parameter_name)
            yield f"{base_name(name)}.{module.parameter_name}", merger
        elif isinstance(module, LoraLayer):
            yield f"{base_name(name)}.weight", _Layer(module, "weight")


def _saved_modules(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of modules that the adapter has a copy of (`modules_to_save`)."""
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for own_name, tensor in module.modules_to_save[ADAPTER].state_dict().items():
                yield f"{name}.{own_name}", tensor


def _trained_base(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The base's own parameters that the adapter's file has values for: trained biases, embeddings.

    Only what the file is for has elements (`_give_memory`).
    """
    inside = tuple(
        f"{name}.{part}."
        for name, module in base.named_modules()
        for part in (*getattr(module, "adapter_layer_names", ()), "modules_to_save")
    )
    for name, tensor in base.named_parameters():
        if not tensor.is_meta and not name.startswith(inside):
            yield base_name(name), tensor.detach()


def base_name(name: str) -> str:
    """A module's or parameter's name in the base model, from that in the wrapped one."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _give_memory(model: PeftModel, stored: Mapping[str, Tensor]) -> set[str]:
    """Give the tensors that the adapter's file is for memory of their own. Returns their names in the model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    selected = get_peft_model_state_dict(
        model, state_dict=dict(parameters), adapter_name=ADAPTER, save_embedding_layers=False
    )
    chosen = {id(tensor) for tensor in selected.values()}
    names = {name for name, tensor in parameters.items() if id(tensor) in chosen or name in stored}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        # PEFT's own `from_pretrained` keeps adapters, and computes with them, in float32.
        dtype = torch.float32 if ".lora_" in name else parameters[name].dtype
        empty = nn.Parameter(torch.empty(parameters[name].shape, dtype=dtype), requires_grad=False)
        model.get_submodule(owner).register_parameter(attribute, empty)
    return names


def _mergeable_config(folder: Path) -> LoraConfig:
    raw = _read_json(folder)
    with _refusals_in_one_line(folder):
        config = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise CheckpointError(f"{folder} holds a {raw.get('peft_type')} adapter: only LoRA can be merged here.")
    found = [option for option in _NOT_MERGED if getattr(config, option, None)]
    initialisation = config.init_lora_weights
    if isinstance(initialisation, str) and initialisation not in _PLAIN_INITIALISATIONS:
        found.append(f"init_lora_weights={initialisation!r}, which changed the base model")
    if found:
        raise CheckpointError(f"{folder} was trained with {', '.join(found)}: merge it with PEFT's merge_and_unload().")
    # Everything is loaded.
    config.init_lora_weights = False
    config.inference_mode = True
    return config


def _refuse_layers(model: PeftModel, folder: Path) -> None:
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        variant = getattr(module, "lora_variant", {}).get(ADAPTER)
        known = isinstance(module, (Linear, Embedding, ParamWrapper))
        if not known or ".modules_to_save." in name or not (variant is None or isinstance(variant, _MERGED_VARIANTS)):
            kind = type(module if variant is None else variant).__name__
            raise CheckpointError(f"{folder} has an adapter of the kind {kind} on {name}, which cannot be merged here.")


def _doubtful_layout(model: PeftModel, folder: Path) -> str:
    """What to add when shapes differ, if the adapter's stacked experts may have A and B the other way round.

    Raises:
        CheckpointError: they may, and the shapes cannot tell.
    """
    raw = _read_json(folder)
    written_by = re.match(r"\d+(\.\d+)*", raw.get("peft_version") or "0")
    if not raw.get("target_parameters") or Version(written_by.group() if written_by else "0") >= _FIRST_UNSWAPPED:
        return ""
    doubt = (
        "PEFT wrote stacked experts' lora_A and lora_B the other way round before 0.19, and adapter_config.json names "
        "no later peft_version: "
    )
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    if any(w._did_swap_in_out_features and w.in_features == w.out_features for w in wrappers):
        raise CheckpointError(f"{folder}: {doubt}convert the adapter with the PEFT that wrote it, or train it again.")
    return f" {doubt}this may be such an adapter."


def _refuse_untying(base: PreTrainedModel, saved: Mapping[str, Tensor]) -> None:
    for name, source in (getattr(base, "all_tied_weights_keys", None) or {}).items():
        values = [saved.get(name), saved.get(source)]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values) or not torch.equal(*values):
            raise CheckpointError(
                f"the adapter brings a {name} or {source} of its own, and the base model ties the two: merge it with "
                f"PEFT's merge_and_unload() into a base with tie_word_embeddings=False."
            )


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


_OTHER_BASE = "Give the base model that it was trained on with --base."


@contextmanager
def _refusals_in_one_line(folder: Path, model: PreTrainedModel | None = None, doubt: str = "") -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        mismatches = [line for line in lines if line.startswith("size mismatch")]
        reason = "; ".join(mismatches[:3]) if mismatches else " ".join(lines)
        where = "cannot be read" if model is None else f"does not fit {type(model).__name__}"
        remedy = "" if model is None else f" {_OTHER_BASE}"
        raise CheckpointError(f"the adapter in {folder} {where}: {reason}{doubt}{remedy}") from error
