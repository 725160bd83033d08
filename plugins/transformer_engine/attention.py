"""Transformer Engine's `DotProductAttention` as an attention of Transformers, by its interface for them.

Two names are registered, `transformer_engine` and `transformer_engine_eager`: they differ in what computes the cases
that Transformer Engine does not have (a cache of earlier keys, masks of other shapes, biases of positions), PyTorch's
SDPA or the model's own eager attention. Those cases are computed as before; they are not approximated.

`DotProductAttention` has no weights; one is shared by all layers that look alike, outside of the model, so that state
dicts do not see it. A learnable sink is lent to it for a call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from expertmesh_plugins.transformer_engine.engine import load
from expertmesh_plugins.transformer_engine.mask import Mask, Sequences, make_mask
from expertmesh_plugins.transformer_engine.pattern import Pattern
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

NAME = "transformer_engine"
_OVER_EAGER = f"{NAME}_eager"
# Where attention stays as it was, because somebody wants it so.
_STAYS: WeakSet[nn.Module] = WeakSet()
# All that were built.
_CORES: dict[int, nn.Module] = {}
# What is done with by the time attention is called, or is part of the mask, or is passed on here.
_UNDERSTOOD = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "scaling",
    "dropout",
    "is_causal",
    "softcap",
    "s_aux",
    "sliding_window",
    "kwargs",
}

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def install(model: nn.Module, stays: list[nn.Module]) -> dict[str, str]:
    """Let a model's attention be computed by Transformer Engine.

    Args:
        model: one of Transformers', or what wraps one.
        stays: modules whose attention is to stay.

    Returns:
        Why it stays elsewhere, by the name of the model's class.
    """
    _register()
    _STAYS.update(stays)
    unable = {}
    for part in _outermost(model):
        if not part._can_set_attn_implementation():
            unable[type(part).__name__] = "its attention does not go through Transformers' attention interface"
            continue
        was_eager = part.config.get_text_config()._attn_implementation in ("eager", _OVER_EAGER)
        part.set_attn_implementation(_OVER_EAGER if was_eager else NAME)
    return unable


def _register() -> None:
    AttentionInterface.register(NAME, partial(attend, lambda module: sdpa_attention_forward))
    AttentionInterface.register(_OVER_EAGER, partial(attend, _eager_attention))
    AttentionMaskInterface.register(NAME, partial(make_mask, sdpa_mask))
    AttentionMaskInterface.register(_OVER_EAGER, partial(make_mask, eager_mask))


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        return [module]
    return [part for child in module.children() for part in _outermost(child)]


def _eager_attention(module: nn.Module) -> Attention | None:
    """A family's own attention, in the file where its modules are."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def attend(
    former: Callable[[nn.Module], Attention],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention of Transformers' interface.

    Args:
        former: what computed a module's attention before.
        module: the attention layer that asks.
        query: `[batch, heads, length, head_dim]`.
        key, value: `[batch, groups, length, head_dim]`; values may have another head_dim.
        attention_mask: what `make_mask` made; None lets every query see all keys, or those up to its own.
        dropout: of the attention weights.
        scaling: of the scores.
        softcap: bound on the scores, by a tanh.
        s_aux: `[heads]`, the sinks' scores.
        is_causal: whether None for a mask is causal; the module says by default.
        others: whatever else a model hands to attention.

    Returns:
        `[batch, length, heads, head_dim]`, and no weights.
    """
    mask = _whole_rows(module, is_causal, others) if attention_mask is None else attention_mask
    if not isinstance(mask, Mask) or query.shape[2] != key.shape[2] or not _is_understood(module, others):
        given = dict(dropout=dropout, scaling=scaling, softcap=softcap, s_aux=s_aux, is_causal=is_causal, **others)
        # Each family's eager attention has parameters of its own: what was not given stays away.
        given = {name: value for name, value in given.items() if value is not None}
        tensor = attention_mask.tensor if isinstance(attention_mask, Mask) else attention_mask
        return former(module)(module, query, key, value, tensor, **given)
    query, key, value = _in_one_dtype(query, key, value)
    core = _core(
        query.shape[1],
        (query.shape[3], value.shape[3]),
        key.shape[1],
        float(dropout),
        scaling,
        float(softcap or 0.0),
        "vanilla" if s_aux is None else "learnable",
    )
    sinks = {} if s_aux is None else {"softmax_offset": s_aux}
    return _compute(core, sinks, query, key, value, mask), None


def _whole_rows(module: nn.Module, is_causal: bool | None, others: dict[str, Any]) -> Mask:
    """What no mask means. Lengths that a collator has counted are used."""
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    pattern = Pattern(is_causal=is_causal, window=(-1, 0 if is_causal else -1))
    bounds = others.get("cu_seq_lens_q")
    if bounds is None:
        return Mask(pattern, None, lambda: None)
    longest = others.get("max_length_q")
    longest = int(bounds.diff().max()) if longest is None else int(longest)
    return Mask(pattern, Sequences(bounds.to(torch.int32), longest, None), lambda: None)


def _is_understood(module: nn.Module, others: dict[str, Any]) -> bool:
    """Whether nothing was handed over that attention has to heed and that is not heeded here."""
    if module in _STAYS or others.get("position_bias") is not None or others.get("output_attentions"):
        return False
    heeded = _heeded(type(module))
    return not any(value is not None and name in heeded for name, value in others.items())


@torch.compiler.assume_constant_result
def _heeded(kind: type[nn.Module]) -> tuple[str, ...]:
    """What a family's own attention has parameters for, beyond what is understood here."""
    return _looked_up(kind)


@cache
def _looked_up(kind: type[nn.Module]) -> tuple[str, ...]:
    eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    return () if eager is None else tuple(inspect.signature(eager).parameters.keys() - _UNDERSTOOD)


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast rotated queries may be wider than values; SDPA is autocast, and this is not."""
    device_type = tensors[0].device.type
    dtype = tensors[-1].dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor.to(dtype) for tensor in tensors)


@dataclass(frozen=True)
class _Kind:
    """What `DotProductAttention` is built for."""

    heads: int
    head_dims: tuple[int, int]
    groups: int
    dropout: float
    scaling: float | None
    softcap: float
    softmax_type: str


def _core(*kind: Any) -> nn.Module:
    return _CORES[_number_of(*kind)]


# While a compiler traces this is called for real, and not again: what it builds is then found like any other module.
@torch.compiler.assume_constant_result
def _number_of(*kind: Any) -> int:
    return _built(_Kind(*kind))


@cache
def _built(kind: _Kind) -> int:
    _CORES[len(_CORES)] = load("transformer_engine.pytorch").DotProductAttention(
        kind.heads,
        kind.head_dims,
        num_gqa_groups=kind.groups,
        attention_dropout=kind.dropout,
        softcap=kind.softcap,
        softmax_scale=kind.scaling,
        softmax_type=kind.softmax_type,
    )
    return len(_CORES) - 1


def _compute(
    core: nn.Module, sinks: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Mask
) -> Tensor:
    batch, heads, length, _ = query.shape
    pattern, sequences = mask.pattern, mask.sequences
    options: dict[str, Any] = {"window_size": _window(pattern, length)}
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if sequences is None:
        options |= {"qkv_format": "bshd", "attn_mask_type": "causal" if pattern.is_causal else "no_mask"}
        output = _call(core, sinks, tensors, options)
        return output.view(batch, length, heads, -1)
    options |= {"qkv_format": "thd", "attn_mask_type": "padding_causal" if pattern.is_causal else "padding"}
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), sequences.bounds)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), sequences.longest)
    tensors = [_taking_part(tensor.flatten(0, 1), sequences) for tensor in tensors]
    output = _call(core, sinks, tensors, options)
    if sequences.tokens is not None:
        output = output.new_zeros(batch * length, output.shape[-1]).index_copy(0, sequences.tokens, output)
    return output.view(batch, length, heads, -1)


def _call(core: nn.Module, sinks: dict[str, Tensor], tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    return functional_call(core, sinks, tuple(tensors), options) if sinks else core(*tensors, **options)


def _taking_part(rows: Tensor, sequences: Sequences) -> Tensor:
    return rows.contiguous() if sequences.tokens is None else rows.index_select(0, sequences.tokens)


def _window(pattern: Pattern, length: int) -> tuple[int, int]:
    """Without a window that no sequence is longer than: kernels without windows are faster, and there are more."""
    left, right = pattern.window
    if max(left, right) < length - 1:
        return left, 0 if pattern.is_causal else right
    return (-1, 0) if pattern.is_causal else (-1, -1)
