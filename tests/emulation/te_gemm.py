"""`y = x W^T + b`, in the dtype of the activations or of numbers that 8 bits can hold, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from emulation.te_recipe import Recipe


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    for tensor in tensors:
        leading = math.prod(tensor.shape[:-1])
        if leading % 8 != 0 or tensor.shape[-1] % 16 != 0:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be"
                " divisible by 8 and the last dimension to be divisible by 16, but got tensor"
                f" with dims={list(tensor.size())} (product of leading dims = {leading}, last dim = {tensor.shape[-1]})"
            )


def linear(inp: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, recipe: Recipe | None) -> Tensor:
    """The product of `[..., in]` and `[out, in]`, in `dtype`.

    Args:
        recipe: how operands are rounded; None: only to `dtype`.
    """
    # `torch.autocast` has no part in it: a module casts by itself.
    with torch.autocast(inp.device.type, enabled=False):
        inp, weight = inp.to(dtype), weight.to(dtype)
        if recipe is None:
            return F.linear(inp, weight, None if bias is None else bias.to(dtype))
        rows = _Rounded.apply(inp.reshape(-1, inp.shape[-1]), weight, recipe)
        if bias is not None:
            # The GEMMs of 8 bits take no bias in float32.
            rows = rows + bias.to(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
        return rows.view(*inp.shape[:-1], weight.shape[0])


class _Rounded(torch.autograd.Function):
    """Each of the three products has operands rounded along the dimension that it sums over."""

    @staticmethod
    def forward(ctx: FunctionCtx, inp: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.recipe = recipe
        product = recipe.rounded(inp, False, 1) @ recipe.rounded(weight, False, 1).t()
        return product.to(inp.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inp, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        grad_inp = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_inp = (recipe.rounded(grad, True, 1) @ recipe.rounded(weight, False, 0)).to(inp.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (recipe.rounded(grad, True, 0).t() @ recipe.rounded(inp, False, 0)).to(weight.dtype)
        return grad_inp, grad_weight, None
