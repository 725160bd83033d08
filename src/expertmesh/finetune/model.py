"""The model of a fine-tune: its configuration first, which is cheap to refuse, then its weights."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from expertmesh.errors import ConfigError
from expertmesh.finetune.adapters import adapt
from expertmesh.finetune.recipe import Recipe
from expertmesh.finetune.values import refuse_unknown


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of the model to train, checked against the tokenizer and the sequence length.

    Raises:
        ConfigError: it cannot be loaded, has an unknown key, or is too small for the tokenizer or the sequences.
    """
    config = _from_recipe(recipe.model_config, tokenizer) if recipe.model_config else _load(str(recipe.model))
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocab_size is {text.vocab_size}: "
            f"use the model's own tokenizer, or a larger vocab_size."
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and recipe.sequence_length > longest:
        raise ConfigError(f"sequence_length {recipe.sequence_length} is more than the model's {longest}: lower it.")
    return config


def build_model(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel | PeftModel:
    """The pretrained weights, with adapters if the recipe has some, or random ones that are equal on every rank.

    Raises:
        ConfigError, ModelError: the adapters do not fit the model.
    """
    dtype = getattr(torch, recipe.dtype)
    if recipe.model is None:
        set_seed(recipe.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, config=config, dtype=dtype)
    if recipe.lora is None:
        return model
    set_seed(recipe.seed)
    return adapt(model, recipe.lora)


def _load(name: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def _from_recipe(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    values = dict(values)
    model_type = values.pop("model_type")
    refuse_unknown([model_type], list(CONFIG_MAPPING), "Transformers' model types")
    _refuse_misspelt(values, model_type)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **special, **values})


def _refuse_misspelt(values: dict[str, Any], model_type: str) -> None:
    """Transformers keeps any key without a word, and some families read keys that their class does not declare.

    Raises:
        ConfigError: a key is not declared but nearly spells one that is.
    """
    declared = AutoConfig.for_model(model_type)
    known = sorted({*declared.to_dict(), *declared.attribute_map})
    for key in values:
        if key not in known and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
            raise ConfigError(f"{key!r} in model_config is not a key of {model_type}: did you mean `{near[0]}`?")
