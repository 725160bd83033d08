"""From a recipe's adapters to a PEFT model: which layers and parameters of this model are meant."""

from __future__ import annotations

from collections.abc import Iterable

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from expertmesh.adapters import find_adapters
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec, is_experts
from expertmesh.finetune.lora import ATTENTION, EXPERTS, ROUTER, SHARED_EXPERTS, LoraRecipe

_DEFAULT = (ATTENTION, EXPERTS)
_ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapt(model: PreTrainedModel, lora: LoraRecipe) -> PeftModel:
    """The model with new adapters; all else is frozen. The adapters' values depend on the random state.

    Raises:
        ConfigError: the model has none of what is to be adapted, or PEFT refuses.
        ModelError: a target parameter that the model does not have, or an adapter that cannot be computed.
    """
    try:
        adapted = get_peft_model(model, peft_config(model, lora))
    except ValueError as error:
        raise ConfigError(f"lora: PEFT cannot adapt {type(model).__name__}: {' '.join(str(error).split())}") from error
    find_adapters(adapted)
    return adapted


def peft_config(model: PreTrainedModel, lora: LoraRecipe) -> LoraConfig:
    """A recipe's adapters in PEFT's words, for one model.

    Raises:
        ConfigError: the model has none of a target.
    """
    modules, parameters = lora.target_modules, lora.target_parameters
    if not lora.names_layers:
        modules, parameters = _targets(model, lora.targets)
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.scaled_by,
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        # Without any, PEFT would choose some of its own.
        target_modules=[] if modules is None else modules,
        target_parameters=parameters,
        modules_to_save=lora.modules_to_save,
        task_type="CAUSAL_LM",
    )


def _targets(model: PreTrainedModel, chosen: list[str] | None) -> tuple[list[str], list[str]]:
    """PEFT's `target_modules` and `target_parameters`.

    Shared experts are named as parameters: PEFT takes the names of their layers for the routed experts' in some
    families, whose checkpoints once had a layer for each.
    """
    found = {
        ATTENTION: _short(name for name, layer in _linear_layers(model) if _is_attention(name)),
        EXPERTS: _short(
            f"{name}.{weight}"
            for name, experts in _experts(model)
            for weight in (ExpertsSpec.of(experts).up_name, "down_proj")
        ),
        SHARED_EXPERTS: _short(
            (f"{name}.weight" for name, layer in _linear_layers(model) if _is_shared_expert(name)), parts=3
        ),
        ROUTER: _short(_routers(model)),
    }
    if chosen is None:
        chosen = [target for target in _DEFAULT if found[target]]
    missing = [target for target in chosen if not found[target]]
    if missing or not chosen:
        raise ConfigError(
            f"lora.targets: {type(model).__name__} has no {' and no '.join(missing or _DEFAULT)}: remove it, or give "
            f"PEFT's target_modules and target_parameters."
        )
    parameters = [name for target in chosen if target != ATTENTION for name in found[target]]
    return found[ATTENTION] if ATTENTION in chosen else [], parameters


def _short(names: Iterable[str], parts: int = 2) -> list[str]:
    """The last components of qualified names, each once: what the layers have in common."""
    return sorted({".".join(name.split(".")[-parts:]) for name in names})


def _linear_layers(model: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _experts(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def _is_attention(name: str) -> bool:
    *path, layer = name.split(".")
    return layer in _ATTENTION_LAYERS or any("attn" in part or "attention" in part for part in path)


def _is_shared_expert(name: str) -> bool:
    return any(part.startswith("shared") for part in name.split(".")[:-1])


def _routers(model: nn.Module) -> Iterable[str]:
    """The matrices beside the experts that have one row for each of them."""
    for name, experts in _experts(model):
        block, _, own = name.rpartition(".")
        for parameter_name, parameter in model.get_submodule(block).named_parameters():
            rows = ExpertsSpec.of(experts).num_experts
            if not parameter_name.startswith(f"{own}.") and parameter.ndim == 2 and parameter.shape[0] == rows:
                yield f"{block}.{parameter_name}"
