"""An adapter of stacked experts as one small adapter for each expert and linear, under a model's published names.

Servers that keep the published layout of a mixture of experts look for these names. Which expert's linear is which part
of which stack is asked of Transformers' own conversion (`trace_save`). Checked on peft 0.21.2, whose conversion
from such adapters to its own layout this inverts.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from expertmesh_plugins.peft.experts import a_by_expert, b_by_expert
from expertmesh_plugins.peft.merge import ADAPTER, base_name, load_adapter
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.checkpoint.conversion import trace_save
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError

_PREFIX = "base_model.model."


def write_per_expert(model: PreTrainedModel, adapter: Path, output: Path) -> bool:
    """Write an adapter folder with one adapter for each expert and linear; all others stay as they are.

    `A` of a stack's adapter is repeated for each of its linears (gate and up), `B` is cut up. The result has one
    scaling for all, which servers can read off `r` and `lora_alpha`: where scalings differ, `B` takes up the ratio, and
    is rounded once. Ranks that differ between layers are filled up with zeros.

    Args:
        model: the base model without weights; its modules are wrapped.
        adapter: the folder to read.
        output: an existing folder.

    Returns:
        Whether PEFT itself can load the result.

    Raises:
        CheckpointError: the adapter has no stacked experts, the model's experts are stored as stacks too, or see
            `load_adapter`.
    """
    saved = trace_save(model)
    adapted = load_adapter(model, adapter)
    stacks = _stacks(adapted)
    stored = load_file(adapter / SAFETENSORS_WEIGHTS_NAME)
    keys = _file_keys(adapted)
    replaced = {keys[id(tensor)] for wrapper in stacks.values() for tensor in _pair(wrapper)}
    if not replaced or not replaced <= stored.keys():
        raise CheckpointError(
            f"{adapter} has no adapters of stacked experts (`target_parameters`), so there is nothing to take apart."
        )
    linears = list(_linears(saved, stacks))
    layout = _Layout.of(linears)
    tensors = {key: tensor for key, tensor in stored.items() if key not in replaced}
    others = _other_layers(adapted)
    for layer in others.values():
        key, ratio = keys[id(_pair(layer)[1])], layer.scaling[ADAPTER] / layout.scaling
        tensors[key] = tensors[key] if ratio == 1 else (tensors[key].float() * ratio).to(tensors[key].dtype)
    for linear in linears:
        dtype = stored[keys[id(linear.stack.lora_A[ADAPTER].weight)]].dtype
        for name, tensor in zip("AB", linear.weights(layout), strict=True):
            tensors[f"{_PREFIX}{linear.name}.lora_{name}.weight"] = tensor.to(dtype).contiguous()
    config = _config(PeftConfig.from_pretrained(str(adapter)), layout, stacks, others)
    save_file(tensors, output / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config.save_pretrained(str(output))
    return _peft_maps(config, adapted, stacks)


@dataclass(frozen=True)
class _Linear:
    """One expert's linear.

    Attributes:
        name: the model's published name for it.
        stack: the adapter of the stack that it is part of.
        expert: its index there.
        out: which of the stack's outputs are its own.
        into: which of the stack's inputs are its own.
    """

    name: str
    stack: ParamWrapper
    expert: int
    out: slice
    into: slice

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def rank(self) -> int:
        return self.stack.r[ADAPTER]

    def weights(self, layout: _Layout) -> tuple[Tensor, Tensor]:
        """Its `lora_A [r, in]` and `lora_B [out, r]`, float32."""
        a, b = _pair(self.stack)
        a = a_by_expert(a, self.stack.num_experts)[self.expert, :, self.into]
        b = b_by_expert(b, self.stack.num_experts)[self.expert, self.out]
        b = b * (self.stack.scaling[ADAPTER] / layout.scaling)
        missing = layout.ranks[self.leaf] - self.rank
        return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


@dataclass(frozen=True)
class _Layout:
    """What all per-expert adapters have in common.

    Attributes:
        rank: `r` of the configuration.
        scaling: of all.
        ranks: by the last part of the linears' names.
        patterns: by the same, what matches these linears' names and that of the stack that PEFT makes of them.
    """

    rank: int
    scaling: float
    ranks: Mapping[str, int]
    patterns: Mapping[str, str]

    @classmethod
    def of(cls, linears: list[_Linear]) -> _Layout:
        ranks: dict[str, int] = defaultdict(int)
        leaves: dict[str, set[str]] = defaultdict(set)
        for linear in linears:
            ranks[linear.leaf] = max(ranks[linear.leaf], linear.rank)
            leaves[linear.stack.parameter_name].add(linear.leaf)
        # PEFT takes the rank of what it fuses (gate and up) from the configuration's `r`, and from no pattern.
        fused = max(leaves.values(), key=len)
        scaling = Counter(linear.stack.scaling[ADAPTER] for linear in linears).most_common(1)[0][0]
        patterns = {
            linear.leaf: rf"(\d+\.{re.escape(linear.leaf)}|experts\.{linear.stack.parameter_name})"
            for linear in linears
        }
        return cls(max(ranks[leaf] for leaf in fused), scaling, dict(ranks), patterns)


def _stacks(adapted: PeftModel) -> dict[str, ParamWrapper]:
    """The adapters of stacks of experts, by the base model's names for the stacks."""
    return {
        f"{base_name(name)}.{module.parameter_name}": module
        for name, module in adapted.get_base_model().named_modules()
        if isinstance(module, ParamWrapper) and module.get_param().ndim > 2
    }


def _other_layers(adapted: PeftModel) -> dict[str, LoraLayer]:
    layers = {
        name: module for name, module in adapted.get_base_model().named_modules() if isinstance(module, LoraLayer)
    }
    return {
        base_name(name): module
        for name, module in layers.items()
        if not (isinstance(module, ParamWrapper) and module.get_param().ndim > 2)
    }


def _linears(saved: Mapping[str, TracedTensor], stacks: Mapping[str, ParamWrapper]) -> Iterator[_Linear]:
    for name, traced in saved.items():
        for source in sorted(traced.sources & stacks.keys()):
            yield _linear(name, traced, source, stacks[source])


def _linear(name: str, traced: TracedTensor, source: str, stack: ParamWrapper) -> _Linear:
    (piece, *others) = traced.pieces or (None, None)
    if others or traced.ndim != 2 or 0 in piece.dims:
        raise CheckpointError(
            f"the experts of this model are published as stacks ({name} holds more than one of them), so there are no "
            f"names of single experts to write adapters for: use the adapter as PEFT wrote it, or export with --merge."
        )
    out_dim, in_dim = (1, 2) if stack._did_swap_in_out_features else (2, 1)
    if piece.dims[0] not in (out_dim, None) or piece.dims[1] not in (in_dim, None):
        raise CheckpointError(f"{name} is no weight of a linear layer, but {source} transposed: export with --merge.")
    start, step = piece.source_offset, [max(step, 1) for step in piece.steps]
    return _Linear(
        name.removesuffix(".weight"),
        stack,
        start[0],
        slice(start[out_dim], start[out_dim] + piece.shape[0] * step[0], step[0]),
        slice(start[in_dim], start[in_dim] + piece.shape[1] * step[1], step[1]),
    )


def _config(
    config: LoraConfig, layout: _Layout, stacks: Mapping[str, ParamWrapper], others: Mapping[str, LoraLayer]
) -> LoraConfig:
    modules = config.target_modules or ()
    if isinstance(modules, str):
        modules = [name for name, layer in others.items() if not isinstance(layer, ParamWrapper)]
    config.target_modules = {*modules, *layout.ranks}
    config.target_parameters = [
        target
        for target in config.target_parameters
        if not any(name == target or name.endswith(f".{target}") for name in stacks)
    ] or None
    config.r, config.lora_alpha, config.use_rslora = layout.rank, _alpha(layout, layout.rank), False
    ranks = {pattern: layout.ranks[leaf] for leaf, pattern in layout.patterns.items()}
    ranks |= {re.escape(name): layer.r[ADAPTER] for name, layer in _pattern_names(others)}
    config.rank_pattern = {pattern: rank for pattern, rank in ranks.items() if rank != layout.rank}
    config.alpha_pattern = {pattern: _alpha(layout, rank) for pattern, rank in config.rank_pattern.items()}
    return config


def _pattern_names(layers: Mapping[str, LoraLayer]) -> Iterator[tuple[str, LoraLayer]]:
    """Each layer with the name that PEFT compares with the patterns of a configuration."""
    for name, layer in layers.items():
        yield (f"{name}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else name), layer


def _alpha(layout: _Layout, rank: int) -> int | float:
    alpha = layout.scaling * rank
    return int(alpha) if float(alpha).is_integer() else alpha


def _peft_maps(config: LoraConfig, adapted: PeftModel, stacks: Mapping[str, ParamWrapper]) -> bool:
    """Whether PEFT makes the model's stacks of the per-expert targets."""
    mapped = copy.deepcopy(config)
    convert_peft_config_for_transformers(mapped, adapted.get_base_model(), None)
    names = {name.rpartition(".")[2] for name in stacks}
    # PEFT names what it makes of gate and up as if `down_proj` was adapted too.
    return "down_proj" in names and names <= set(mapped.target_parameters or ())


def _file_keys(adapted: PeftModel) -> dict[int, str]:
    """PEFT's names in an adapter's file, by the identity of the model's tensors."""
    parameters = dict(adapted.named_parameters())
    selected = get_peft_model_state_dict(
        adapted, state_dict=parameters, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {id(tensor): key for key, tensor in selected.items()}


def _pair(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    if ADAPTER in layer.lora_embedding_A:
        return layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
