"""Transformer Engine's own Triton kernels, interpreted, against the emulation's permutation. Prints what differs.

Forward and backward, with routing weights, with and without padding. Run with the folder of the wheel and
`TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from te_fidelity.real import install

TOKENS, EXPERTS, HIDDEN = 13, 5, 24
# Narrower than the rows, so that several blocks make up one.
BLOCK = 16


class _Launched:
    """A kernel without the search for its block size, which would need a driver."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Callable) -> Callable:
        launch = self.kernel.fn[grid]
        return lambda *arguments, **options: launch(*arguments, BLOCK_SIZE=BLOCK, **options)


def wrappers() -> types.ModuleType:
    """Their wrappers, which allocate on the GPU by name."""
    import transformer_engine.pytorch.triton.permutation as real
    from triton.runtime.autotuner import Autotuner

    for name, kernel in list(vars(real).items()):
        if isinstance(kernel, Autotuner):
            setattr(real, name, _Launched(kernel))
    on_cpu = {"empty": _without_device(torch.empty), "zeros": _without_device(torch.zeros)}
    real.torch = types.SimpleNamespace(**{**vars(torch), **on_cpu})
    return real


def _without_device(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *shape, device, **options: allocate(*shape, **options)


def differences(real: types.ModuleType, is_padded: bool) -> list[str]:
    """Where the emulation does something else."""
    from emulation import te, te_device

    te_device.ALLOW_CPU = True
    generator = torch.Generator().manual_seed(0)
    routed = (torch.rand(TOKENS, EXPERTS, generator=generator) > 0.5).int()
    routed[3] = 0
    routed[:, 2] = 0
    counts = routed.sum(0)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
    probs = torch.rand(TOKENS, EXPERTS, generator=generator) * routed
    leaves = [tensor.clone().requires_grad_() for tensor in (tokens, probs)]
    if is_padded:
        rows, row_probs, row_id_map, pad, sizes = te.moe_permute_and_pad_with_probs(*leaves, routed, counts, 8)
        num_rows = int(sizes.sum())
    else:
        num_rows, pad = int(counts.sum()), None
        rows, row_probs, row_id_map = te.moe_permute_with_probs(*leaves, routed, num_rows)
    merged = te.moe_unpermute(rows, row_id_map, leaves[1], restore_shape=tokens.shape, pad_offsets=pad)
    plain = te.moe_unpermute(rows.detach(), row_id_map, restore_shape=tokens.shape, pad_offsets=pad)
    grad_rows, grad_probs = torch.randn(rows.shape, generator=generator), torch.randn(num_rows, generator=generator)
    grad_tokens, grad_of_probs = torch.autograd.grad([rows, row_probs], leaves, [grad_rows, grad_probs])

    size = (TOKENS, EXPERTS)
    real_map = real.make_row_id_map(routed, *size)
    real_rows, _, real_probs = real.permute_with_mask_map(
        tokens, real_map, probs, None, pad, *size, num_rows, HIDDEN, None
    )
    real_merged, _ = real.unpermute_with_mask_map(real_rows, real_map, probs, None, pad, *size, HIDDEN)
    real_plain, _ = real.unpermute_with_mask_map(real_rows, real_map, None, None, pad, *size, HIDDEN)
    real_grad, real_grad_of_probs = real.unpermute_with_mask_map(
        grad_rows, real_map, None, grad_probs, pad, *size, HIDDEN
    )
    pairs = {
        "row_id_map": (_without_rest(row_id_map), _without_rest(real_map)),
        "rows": (rows, real_rows),
        "probabilities": (row_probs, real_probs),
        "merged with probabilities": (merged, real_merged),
        "merged": (plain, real_plain),
        "gradient of tokens": (grad_tokens, real_grad),
        "gradient of probabilities": (grad_of_probs, real_grad_of_probs * routed),
    }
    return [
        f"{name}, {'padded' if is_padded else 'not padded'}: {(ours - theirs).abs().max()}"
        for name, (ours, theirs) in pairs.items()
        if not torch.allclose(ours.float(), theirs.float(), rtol=1e-6, atol=1e-6)
    ]


def _without_rest(row_id_map: Tensor) -> Tensor:
    """Without what lies behind each token's rows, and behind its experts."""
    behind = torch.arange(EXPERTS) >= row_id_map[:, -1:]
    return row_id_map.masked_fill(torch.cat([behind, behind, torch.zeros(TOKENS, 1, dtype=torch.bool)], 1), -1)


def main(folder: str) -> None:
    install(Path(folder))
    real = wrappers()
    print([*differences(real, is_padded=False), *differences(real, is_padded=True)])


if __name__ == "__main__":
    main(sys.argv[1])
