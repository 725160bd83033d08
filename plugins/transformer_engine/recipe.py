"""8 bits: which recipe, whether the device has it, and which modules use it.

A module uses its recipe by itself, in its own forward, and not because of what surrounds it: so it also does when only
a part of a block is computed again for the backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from expertmesh_plugins.transformer_engine.engine import load
from torch import nn

from expertmesh.errors import ConfigError

# `DelayedScaling` is not among them: it keeps amaxes of earlier steps in the modules, and checkpoints have no place for
# those.
_CLASSES = {"float8_current_scaling": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}
_RECIPES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def build_recipe(name: str) -> Any:
    """A Transformer Engine `Recipe`; `auto` is the newest that the device has.

    Args:
        name: a value of `ep_fp8_recipe`.

    Raises:
        ConfigError: the device does not have it, in Transformer Engine's own words.
    """
    engine = load("transformer_engine.pytorch")
    answers = {
        "mxfp8": engine.is_mxfp8_available(return_reason=True),
        "float8_current_scaling": engine.is_fp8_available(return_reason=True),
    }
    wanted = list(answers) if name == "auto" else [name]
    for each in wanted:
        if answers[each][0]:
            return getattr(load("transformer_engine.common.recipe"), _CLASSES[each])()
    others = [other for other, (works, _) in answers.items() if works]
    remedy = f"ep_fp8_recipe to {' or '.join(others)}" if others else "mixed_precision to bf16"
    raise ConfigError(f"ep_fp8_recipe {name} cannot be used here: {answers[wanted[-1]][1].rstrip('.')}: set {remedy}.")


def use_recipe(module: nn.Module, recipe: Any) -> None:
    """Let a module, or what computes it, multiply in 8 bits."""
    _RECIPES[module] = recipe


def recipe_of(module: nn.Module) -> Any | None:
    """The recipe that a module was told to use."""
    return _RECIPES.get(module)


def alignment_of(recipe: Any) -> int:
    """What the rows and columns of matrices have to be multiples of."""
    return load("transformer_engine.pytorch.quantization").get_align_size_for_quantization(recipe)


def in_bits_of(recipe: Any | None) -> AbstractContextManager[Any]:
    """Where Transformer Engine's modules multiply as a recipe says; without one, as they would anyway."""
    return nullcontext() if recipe is None else load("transformer_engine.pytorch").autocast(enabled=True, recipe=recipe)
