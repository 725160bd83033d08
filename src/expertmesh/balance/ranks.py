"""Sums over all ranks. Every rank has its own tokens, so together the ranks hold the global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from expertmesh.ranks import num_ranks


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all ranks, a new tensor. Collective.

    The gradient is that of the mean of all ranks' losses, times their number, because averaging gradients will divide
    by it. It takes every rank's loss to depend on the sum in the same way, and then needs no communication.
    """
    return _SumOverRanks.apply(tensor) if num_ranks() > 1 else tensor.clone()


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad * num_ranks()
