"""Rows sorted by expert, padded, and back: `moe_permute*`, `moe_unpermute`, `Fp8Padding`; maps of kind "mask"."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from emulation import te_device
from emulation.errors import EmulationError
from emulation.te_quantization import FP8GlobalStateManager, get_align_size_for_quantization


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    if map_type == "index":
        raise EmulationError("map_type index is not emulated")
    if map_type != "mask":
        raise ValueError("map_type should be one of 'mask' or 'index'")
    rows, _, row_id_map = _permute(inp, None, routing_map, num_out_tokens, None)
    return rows, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _permute(inp, probs, routing_map, num_out_tokens, None)


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    if tokens_per_expert is None:
        raise ValueError("tokens_per_expert must be provided to the fused permute padding function.")
    if align_size <= 0:
        raise ValueError(f"align_size must be positive, got {align_size}.")
    padded = (torch.ceil(tokens_per_expert / align_size) * align_size).long()
    pad_offsets = None
    if not torch.equal(tokens_per_expert, padded):
        lengths = padded - tokens_per_expert
        pad_offsets = lengths.cumsum(0) - lengths
    rows, row_probs, row_id_map = _permute(inp, probs, routing_map, padded.sum().item(), pad_offsets)
    return rows, row_probs, row_id_map, pad_offsets, padded


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    if map_type != "mask" or probs is not None:
        raise EmulationError("map_type index and the deprecated probs are not emulated")
    num_tokens, hidden = inp.shape if restore_shape is None else restore_shape
    if num_tokens == 0:
        return inp.clone()
    num_experts = (row_id_map.size(1) - 1) // 2
    token, expert, row = _pairs(row_id_map, num_experts, pad_offsets)
    picked = inp[row].float()
    if merging_probs is not None:
        picked = picked * merging_probs[token, expert].float().unsqueeze(1)
    total = torch.zeros(num_tokens, hidden, device=inp.device).index_add(0, token, picked)
    return total.to(inp.dtype)


def _permute(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int, pad_offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = routing_map.size(1)
    if not inp.numel():
        row_id_map = torch.empty(0, num_experts * 2 + 1, dtype=torch.int32, device=inp.device)
        return inp.clone(), inp.new_empty(0, dtype=torch.float32 if probs is None else probs.dtype), row_id_map
    for name, tensor in (("inp", inp), ("routing_map", routing_map), ("probs", probs)):
        if tensor is not None and not (te_device.ALLOW_CPU or tensor.is_cuda):
            raise ValueError(f"{name} must be a CUDA tensor, but got tensor on {tensor.device}.")
    if inp.size(0) != routing_map.size(0):
        raise ValueError(
            f"Permute not possible: inp.size(0) ({inp.size(0)}) must match routing_map.size(0) ({routing_map.size(0)})."
        )
    assert num_out_tokens > 0, f"moe_permute (mask map) requires num_out_tokens > 0, got {num_out_tokens}."
    row_id_map = _row_id_map(routing_map.ne(0))
    token, expert, row = _pairs(row_id_map, num_experts, pad_offsets)
    if pad_offsets is None:
        # Rows that nobody writes hold what was there.
        rows = inp.new_full((num_out_tokens, inp.size(1)), float("nan"))
    else:
        rows = inp.new_zeros(num_out_tokens, inp.size(1))
    rows = rows.index_copy(0, row, inp[token])
    if probs is None:
        return rows, inp.new_empty(0, dtype=torch.float32), row_id_map
    row_probs = probs.new_zeros(num_out_tokens).index_copy(0, row, probs[token, expert])
    return rows, row_probs, row_id_map


def _row_id_map(routed: Tensor) -> Tensor:
    """`[tokens, 2 experts + 1]`: a token's rows, the last expert's first; these experts; how many they are.

    Rows lie by expert, within an expert by token.
    """
    num_tokens, num_experts = routed.shape
    counts = routed.sum(0)
    starts = counts.cumsum(0) - counts
    row = starts + routed.cumsum(0) - 1
    row_id_map = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32, device=routed.device)
    # In descending order of rows, as the real one sorts them.
    order = torch.where(routed, row, -1).argsort(1, descending=True)
    of_token = routed.sum(1, keepdim=True)
    is_there = torch.arange(num_experts, device=routed.device) < of_token
    row_id_map[:, :num_experts] = torch.where(is_there, row.gather(1, order), -1)
    row_id_map[:, num_experts:-1] = torch.where(is_there, order, -1)
    row_id_map[:, -1:] = of_token
    return row_id_map


def _pairs(row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of each of the pairs, `[pairs]` int64."""
    of_token = row_id_map[:, -1].long()
    slots = torch.arange(num_experts, device=row_id_map.device)
    token, slot = (slots < of_token.unsqueeze(1)).nonzero(as_tuple=True)
    row = row_id_map[token, slot].long()
    expert = row_id_map[token, num_experts + slot].long()
    return token, expert, row if pad_offsets is None else row + pad_offsets[expert]


class _Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        if isinstance(m_splits, Tensor):
            raise EmulationError("m_splits is a list here")
        if self.align_size is None:
            # Asked once, at the first forward.
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        return [(size + self.align_size - 1) // self.align_size * self.align_size for size in m_splits]


class Fp8Padding(_Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = self._padded(m_splits)
        if padded == m_splits:
            return inp, m_splits
        pieces = inp.reshape(-1, inp.shape[-1]).split(m_splits)
        grown = [nn.functional.pad(x, (0, 0, 0, size - len(x))) for x, size in zip(pieces, padded, strict=True)]
        return torch.cat(grown), padded


class Fp8Unpadding(_Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        padded = self._padded(m_splits)
        if padded == m_splits:
            return inp
        pieces = inp.reshape(-1, inp.shape[-1]).split(padded)
        return torch.cat([x[:size] for x, size in zip(pieces, m_splits, strict=True)])
