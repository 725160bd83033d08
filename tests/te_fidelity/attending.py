"""Our attention for Transformers on Transformer Engine's own, against plain steps of PyTorch. Prints the errors.

Of the output and of the gradients of queries, keys, values and sinks, at tokens that take part. Run as `attention.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from expertmesh_plugins.transformer_engine import attention, mask
from torch import Tensor, nn
from transformers import masking_utils as hf

from te_fidelity.attention import BATCH, DIM, GROUPS, HEADS, LENGTH, OnTheCPU, real


def requests() -> dict[str, dict]:
    """Of masks, as models ask for them."""
    takes_part = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    takes_part[0, :3] = takes_part[1, 8:] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]])
    packed = hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(positions))
    window = hf.sliding_window_causal_mask_function(4)
    remapped = hf.remap_positions_for_packed_sequence(window, positions)
    return {
        "rows": dict(mask_function=hf.causal_mask_function),
        "padded": dict(mask_function=hf.causal_mask_function, attention_mask=takes_part),
        "both ways, padded": dict(mask_function=hf.bidirectional_mask_function, attention_mask=takes_part),
        "window": dict(mask_function=window),
        "window, padded": dict(mask_function=window, attention_mask=takes_part),
        "window, packed": dict(mask_function=hf.and_masks(remapped, packed)),
    }


def plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * DIM**-0.5).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)], -1)
    return (scores.softmax(-1)[..., :LENGTH] @ value).transpose(1, 2)


def gradients(output: Tensor, picked: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    part = output[picked]
    mixed = (part * torch.linspace(-1, 1, part.numel()).view_as(part)).sum()
    return [part.detach(), *torch.autograd.grad(mixed, leaves)]


def error(request: dict, with_sinks: bool) -> float:
    """The largest, relative to a tensor's largest entry."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(BATCH, n, LENGTH, DIM, generator=generator) for n in (HEADS, GROUPS, GROUPS)]
    leaves += [torch.randn(HEADS, generator=generator)] if with_sinks else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    sinks = leaves[3] if with_sinks else None
    request = dict(batch_size=BATCH, q_length=LENGTH, kv_length=LENGTH, allow_is_causal_skip=False) | request
    visible = hf.sdpa_mask(**request)
    picked = request.get("attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.bool))
    made = mask.make_mask(hf.sdpa_mask, **request)
    # Padding sees nothing, which plain steps cannot divide by.
    visible = visible | ~picked.view(BATCH, 1, LENGTH, 1)
    expected = gradients(plain(*leaves[:3], visible, sinks), picked, leaves)
    with OnTheCPU():
        output, _ = attention.attend(None, nn.Module(), *leaves[:3], made, scaling=DIM**-0.5, s_aux=sinks)
        found = gradients(output, picked, leaves)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))


def main(folder: str) -> None:
    real(Path(folder))
    print(
        json.dumps(
            {
                name + (", sinks" if with_sinks else ""): error(request, with_sinks)
                for name, request in requests().items()
                for with_sinks in (False, True)
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
