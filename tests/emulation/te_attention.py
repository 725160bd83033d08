"""`DotProductAttention`, in plain steps: scores, cap, mask, softmax with or without a sink."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from emulation import te_device
from emulation.errors import EmulationError, require
from emulation.te_modules import TransformerEngineBaseModule, _not_emulated

_MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | list[ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: torch.cuda.Stream | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        _not_emulated(sequence_parallel=sequence_parallel, tp_size=tp_size != 1, tp_group=tp_group, cp_group=cp_group)
        _not_emulated(return_max_logit=return_max_logit, attention_type=attention_type != "self")
        channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.head_dim, self.head_dim_v = channels
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % self.num_gqa_groups == 0, (
            "The number of attention heads must be divisible by the number of GQA groups!"
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = _one_name(attn_mask_type)
        self.window_size = _window(self.attn_mask_type, window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap = softcap
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(self.head_dim)
        self.softmax_type = softmax_type
        if softmax_type == "vanilla":
            self.softmax_offset = None
        elif softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(num_attention_heads, device=te_device.default())
        elif softmax_type == "learnable":
            # On the GPU and in float32, whatever one asks for.
            where = dict(device=te_device.default(), dtype=torch.float32)
            self.new_parameter("softmax_offset", (num_attention_heads,), nn.init.zeros_, **where)
            self.reset_parameters()
        else:
            raise EmulationError(f"softmax_type {softmax_type!r}")

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        _not_emulated(
            checkpoint_core_attention=checkpoint_core_attention,
            bias=core_attention_bias_type != "no_bias" or core_attention_bias is not None,
            alibi_slopes=alibi_slopes,
            inference_params=inference_params,
            pad_between_seqs=pad_between_seqs or cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None,
            score_mod=score_mod,
            packed=qkv_layer is not None or kv_layer is not None,
            thd_attention_policies=thd_attention_policies,
            fp8_output=fp8_output,
        )
        q, k, v = query_layer, key_layer, value_layer
        recipe = self.prepare_forward(q, may_differ=self.softmax_type != "vanilla")
        _not_emulated(fp8_dpa=recipe is not None and recipe.fp8_dpa)
        mask_type = self.attn_mask_type if attn_mask_type is None else _one_name(attn_mask_type)
        window = _window(mask_type, self.window_size if window_size is None else window_size)
        cap = self.softcap if softcap is None else softcap
        if not math.isfinite(cap) or cap < 0.0:
            raise ValueError(f"softcap must be finite and non-negative, got {cap}.")
        layout = self.qkv_format if qkv_format is None else qkv_format
        self._check(q, k, v, layout, mask_type, cu_seqlens_q, cu_seqlens_kv)
        from_bottom_right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        if mask_type in ("causal", "padding_causal"):
            from_bottom_right = False
        elif from_bottom_right is None or mask_type.endswith("bottom_right"):
            from_bottom_right = True

        if layout == "thd":
            lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
            _check_lengths(lengths_q, max_seqlen_q, q)
            _check_lengths(lengths_k, max_seqlen_kv, k)
            q, k, v = _padded(q, lengths_q), _padded(k, lengths_k), _padded(v, lengths_k)
        elif layout == "sbhd":
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        hidden = self._hidden(q, k, mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv, window, from_bottom_right)
        context = self._attend(q, k, v, hidden, cap, "padding" in mask_type)
        context = context.flatten(2)
        if layout == "thd":
            return torch.cat([sequence[:length] for sequence, length in zip(context, lengths_q, strict=True)])
        return context.transpose(0, 1).contiguous() if layout == "sbhd" else context

    def _check(self, q, k, v, layout, mask_type, cu_seqlens_q, cu_seqlens_kv) -> None:
        assert q.dtype == k.dtype == v.dtype, "Queries, keys and values must have the same data type!"
        assert k.shape[:-1] == v.shape[:-1], (
            "Keys and values must have the same batch size, sequence length and number of heads!"
        )
        assert q.shape[-1] == k.shape[-1] == self.head_dim, f"Keys have head_dim = {k.shape[-1]}"
        assert v.shape[-1] == self.head_dim_v, f"Values have head_dim = {v.shape[-1]}"
        assert k.shape[-2] == self.num_gqa_groups, f"Keys and values must have num_gqa_group = {self.num_gqa_groups}"
        require(q.shape[-2] == self.num_attention_heads, "queries of another number of heads")
        assert mask_type in _MASK_TYPES, f"Attention mask type {mask_type} is not supported!"
        assert layout in ("sbhd", "bshd", "thd"), (
            "DotProductAttention only supports qkv_format = {'sbhd', 'bshd', 'thd'}!"
        )
        dims = 3 if layout == "thd" else 4
        assert all(x.dim() == dims for x in (q, k, v)), f"Queries, keys and values must be {dims}D for {layout}!"
        if layout != "thd":
            return
        assert "padding" in mask_type, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        given = (cu_seqlens_q, cu_seqlens_kv)
        assert all(x is not None for x in given), (
            "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        )
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape and cu_seqlens_q.dim() == 1, "shape [batch_size + 1]!"
        assert all(x.dtype == torch.int32 for x in given), "cu_seqlens_q and cu_seqlens_q must be torch.int32!"

    def _hidden(self, q, k, mask_type, mask, cu_seqlens_q, cu_seqlens_kv, window, from_bottom_right) -> Tensor:
        """`[batch or 1, 1 or heads, queries, keys]`, true where a query must not look."""
        num_q, num_k, device = q.shape[1], k.shape[1], q.device
        lengths_q = torch.full((len(q),), num_q, device=device)
        lengths_k = torch.full((len(k),), num_k, device=device)
        hidden = torch.zeros(1, 1, num_q, num_k, dtype=torch.bool, device=device)
        if mask_type == "arbitrary":
            assert mask is not None and mask.dtype == torch.bool, "attention_mask: a bool tensor, true where masked out"
            hidden = hidden | mask
        elif "padding" in mask_type:
            if mask is None:
                assert cu_seqlens_q is not None and cu_seqlens_kv is not None, "padding without mask or cu_seqlens"
                lengths_q, lengths_k = cu_seqlens_q.diff().long(), cu_seqlens_kv.diff().long()
                out_q, out_k = (_behind(n, x.shape[1]) for n, x in ((lengths_q, q), (lengths_k, k)))
            else:
                require(
                    isinstance(mask, Tensor) and mask.dtype == torch.bool, "attention_mask: bool, true = masked out"
                )
                require(tuple(mask.shape) == (len(q), 1, 1, num_q), "attention_mask: [batch_size, 1, 1, max_seqlen_q]")
                # Fused kernels get lengths, by counting: as if padding were on the right.
                require(not bool((mask[..., :-1] & ~mask[..., 1:]).any()), "padding that is not on the right")
                out_q = out_k = mask
                lengths_q = lengths_k = (~mask).sum((1, 2, 3))
            hidden = hidden | out_q.transpose(2, 3) | out_k
        else:
            require(mask is None, f"an attention_mask is ignored with attn_mask_type {mask_type}")
        left, right = window
        if (left, right) != (-1, -1):
            diagonal = (lengths_k - lengths_q if from_bottom_right else 0 * lengths_k).view(-1, 1, 1, 1)
            distance = torch.arange(num_k, device=device) - torch.arange(num_q, device=device).unsqueeze(1) - diagonal
            hidden = hidden | (distance > right if right >= 0 else False)
            hidden = hidden | (distance < -left if left >= 0 else False)
        return hidden

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, cap: float, is_padded: bool) -> Tensor:
        """`[batch, queries, heads, head_dim_v]`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        groups = self.num_attention_heads // self.num_gqa_groups
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(2, 3)).float() * self.softmax_scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, -10000.0)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        if is_padded:
            # Queries of padding look nowhere.
            weights = weights.masked_fill(hidden, 0)
        weights = F.dropout(weights.to(v.dtype), self.attention_dropout, self.training)
        return (weights @ v).transpose(1, 2)


def _one_name(mask_type: str) -> str:
    name = mask_type.replace(",", "_")
    return "padding_causal" if name == "causal_padding" else name


def _window(mask_type: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """`(left, right)`; the real one corrects what does not fit the mask and only warns."""
    is_causal = "causal" in mask_type
    if window is None:
        return (-1, 0) if is_causal else (-1, -1)
    left, right = window
    if is_causal:
        require(right == 0 and left >= -1, f"window_size should be (-1, 0) or (>=0, 0) for attn_mask_type={mask_type}")
    else:
        fits = (left, right) == (-1, -1) or (left >= 0 and right >= 0)
        require(fits, f"window_size should be (-1, -1) or (>=0, >=0) for attn_mask_type={mask_type}")
    return left, right


def _check_lengths(lengths: list[int], most: int | None, x: Tensor) -> None:
    require(sum(lengths) == len(x), "cu_seqlens that do not cover all tokens: the rest is not computed")
    require(most is None or most >= max(lengths), "a sequence that is longer than max_seqlen")


def _padded(x: Tensor, lengths: list[int]) -> Tensor:
    """`[tokens, heads, dim]` to `[sequences, longest, heads, dim]`."""
    return nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True)


def _behind(lengths: Tensor, size: int) -> Tensor:
    """`[batch, 1, 1, size]`, true behind each sequence's end."""
    return (torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)).view(len(lengths), 1, 1, size)
