"""Transformer Engine's own attention in PyTorch (its "unfused" one), against the emulation's. Prints the errors.

With masks of every kind, windows, caps, sinks and packed sequences, forward and backward; where there is padding, of
real queries only. Run with the folder of the wheel, `NVTE_FLASH_ATTN=0` and `NVTE_FUSED_ATTN=0`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_fidelity.real import install

BATCH, LENGTH, HEADS, GROUPS, DIM = 2, 11, 4, 2, 8
LENGTHS = (LENGTH, 6)


class OnTheCPU(TorchFunctionMode):
    """What asks for the GPU by name is made here."""

    def __torch_function__(
        self, function: Callable, types: object, arguments: tuple = (), options: dict | None = None
    ) -> object:
        options = dict(options or {})
        if options.get("device") is not None:
            options["device"] = "cpu"
        return function(*arguments, **options)


def cases() -> dict[str, tuple[dict, dict]]:
    """Of the constructor and of the forward."""
    padding = (torch.arange(LENGTH) >= torch.tensor(LENGTHS).unsqueeze(1)).view(BATCH, 1, 1, LENGTH)
    ends = torch.tensor([0, 5, 5 + LENGTH, BATCH * LENGTH], dtype=torch.int32)
    packed = dict(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=16, max_seqlen_kv=16)
    arbitrary = torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.7
    return {
        "causal": ({}, {}),
        "window": (dict(window_size=(3, 0)), {}),
        "window at the call": ({}, dict(window_size=(2, 0))),
        "cap": (dict(softcap=1.5), {}),
        "scale": (dict(softmax_scale=0.7), {}),
        "no mask": (dict(attn_mask_type="no_mask"), {}),
        "window both ways": (dict(attn_mask_type="no_mask", window_size=(2, 1)), {}),
        "arbitrary": (dict(attn_mask_type="arbitrary"), dict(attention_mask=arbitrary)),
        "padding": (dict(attn_mask_type="padding"), dict(attention_mask=padding)),
        "padding, causal": (dict(attn_mask_type="padding_causal"), dict(attention_mask=padding)),
        "padding, causal, window": (
            dict(attn_mask_type="padding_causal", window_size=(3, 0)),
            dict(attention_mask=padding),
        ),
        "packed": (dict(qkv_format="thd", attn_mask_type="padding_causal"), packed),
        "packed, window": (dict(qkv_format="thd", attn_mask_type="padding_causal", window_size=(2, 0)), packed),
        "learnable sinks": (dict(softmax_type="learnable"), {}),
        "sinks of zero": (dict(softmax_type="off-by-one"), {}),
        "learnable sinks, window": (dict(softmax_type="learnable", window_size=(3, 0)), {}),
    }


def outcome(te: ModuleType, constructed: dict, called: dict) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, LENGTH, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    is_packed = constructed.get("qkv_format") == "thd"
    leaves = [(x.flatten(0, 1) if is_packed else x).requires_grad_() for x in (q, k, v)]
    attention = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **{"qkv_format": "bshd", **constructed})
    for sink in attention.parameters():
        torch.nn.init.normal_(sink, generator=generator)
        leaves.append(sink)
    output = attention(*leaves[:3], **called)
    real = torch.arange(LENGTH) < torch.tensor(LENGTHS).unsqueeze(1)
    picked = output[real] if "attention_mask" in called and called["attention_mask"].shape[2] == 1 else output
    mixed = (picked * torch.linspace(-1, 1, picked.numel()).view_as(picked)).sum()
    return [picked.detach(), *torch.autograd.grad(mixed, leaves)]


def convert_thd_to_bshd(packed: Tensor, ends: Tensor, batch: int, longest: int) -> Tensor:
    """Theirs, in PyTorch: `[tokens, heads, dim]` to `[batch, longest, heads, dim]`."""
    padded = packed.new_zeros(batch, longest, *packed.shape[1:])
    for i, sequence in enumerate(packed.split(ends.diff().tolist())):
        padded[i, : len(sequence)] = sequence
    return padded


def convert_bshd_to_thd(padded: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
    """Theirs, in PyTorch: the way back."""
    return torch.cat([sequence[:length] for sequence, length in zip(padded, ends.diff().tolist(), strict=True)])


def real(folder: Path) -> ModuleType:
    """`transformer_engine.pytorch`, whose attention in PyTorch runs here, inside of `OnTheCPU`."""
    install(folder)
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.is_current_stream_capturing = lambda: False
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    binary = sys.modules["transformer_engine_torch"]
    binary.convert_thd_to_bshd, binary.convert_bshd_to_thd = convert_thd_to_bshd, convert_bshd_to_thd
    utils.get_cudnn_version = lambda: (9, 10, 0)
    return te


def main(folder: str) -> None:
    from emulation import te as emulated
    from emulation import te_device

    te_device.ALLOW_CPU = True
    torch.manual_seed(0)
    ours = {name: outcome(emulated, *case) for name, case in cases().items()}
    te = real(Path(folder))
    torch.manual_seed(0)
    with OnTheCPU():
        theirs = {name: outcome(te, *case) for name, case in cases().items()}
    errors = {
        name: max(
            ((mine - other).abs().max() / other.abs().max()).item()
            for mine, other in zip(ours[name], theirs[name], strict=True)
        )
        for name in ours
    }
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
