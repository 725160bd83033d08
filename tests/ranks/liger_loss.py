"""Liger's kernels, interpreted, against ours: run by `test_loss.py` where Liger is installed; asserts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expertmesh_plugins.liger import linear_cross_entropy as of_liger
from torch import Tensor

from expertmesh.loss import linear_cross_entropy


def outcome(function: Callable[..., Tensor], leaves: list[Tensor], targets: Tensor, smoothing: float) -> list[Tensor]:
    hidden, weight, bias = (*leaves, None)[:3]
    loss = function(hidden, weight, bias, targets, label_smoothing=smoothing) / 7
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for smoothing in (0.0, 0.1):
        for shapes in (((24, 32), (300, 32)), ((24, 32), (300, 32), (300,))):
            leaves = [(0.3 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]
            targets = torch.randint(0, 300, (24,), generator=generator)
            targets[::5] = -100
            ours, theirs = (outcome(each, leaves, targets, smoothing) for each in (linear_cross_entropy, of_liger))
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine - other).abs().max() <= 2e-6 * other.abs().max()


if __name__ == "__main__":
    main()
