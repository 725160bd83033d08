"""Transformer Engine's own linear modules on the CPU: the GEMMs beneath them are PyTorch's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from te_fidelity.real import install

# Rows by weights; gradients by weights; gradients by rows.
_PRODUCTS = {"TN": lambda a, b: b @ a.t(), "NN": lambda a, b: b @ a, "NT": lambda a, b: b.t() @ a}


def general_gemm(
    A: Tensor,
    B: Tensor,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    grad: bool = False,
    **options: object,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Theirs, in PyTorch. With `grad` and a bias it gives the bias's gradient too."""
    B = B.reshape(-1, B.shape[-1]) if layout == "NT" else B
    A = A.reshape(-1, A.shape[-1]) if layout == "NT" else A
    product = _PRODUCTS[layout](A, B)
    if bias is not None and not grad:
        product = product + bias
    if out is not None:
        product = out.copy_(product)
    return product, B.sum(0) if bias is not None and grad else None, None, None


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    grad: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    single_output: bool = False,
    **options: object,
) -> tuple[list[Tensor], list[Tensor] | None, None]:
    """Theirs, in PyTorch; see `general_gemm`."""
    results = out[0].split(m_splits) if single_output else out
    biases = bias if use_bias else [None] * len(A)
    made = [
        general_gemm(a, b, layout, result, one_bias, grad)[1]
        for a, b, result, one_bias in zip(A, B, results, biases, strict=True)
    ]
    return out, made if grad and use_bias else bias, None


def on_the_cpu(folder: Path) -> None:
    """Make `import transformer_engine` find the wheel unpacked in a folder, and let its modules compute here."""
    install(folder)
    from transformer_engine.pytorch import utils
    from transformer_engine.pytorch.module import grouped_linear, linear

    grouped_linear.general_grouped_gemm = general_grouped_gemm
    linear.general_gemm = general_gemm
    utils._empty_tensor = lambda: torch.empty(0)
    # They ask the input.
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.is_current_stream_capturing = lambda: False
