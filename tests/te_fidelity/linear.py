"""Transformer Engine's own `Linear` with the Parameters of an `nn.Linear`, which it takes over on "meta".

Prints the relative errors of the output and of all gradients, with and without bias, trained and frozen. Run with the
folder of the wheel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from te_fidelity.gemm import on_the_cpu


def adopted(te: ModuleType, plain: nn.Linear) -> nn.Module:
    """A `Linear` of theirs with the same Parameters."""
    has_bias = plain.bias is not None
    linear = te.Linear(plain.in_features, plain.out_features, bias=has_bias, device="meta")
    linear.weight = plain.weight
    if has_bias:
        linear.bias = plain.bias
    return linear


def outcome(linear: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The output, and the gradients of the input and of what is trained."""
    output = linear(x)
    leaves = [x, *(parameter for parameter in parameters if parameter.requires_grad)]
    mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    return [output.detach(), *torch.autograd.grad(mixed, leaves)]


def main(folder: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 32, requires_grad=True)
    models = [
        nn.Linear(32, 24, bias=has_bias).requires_grad_(is_trained)
        for has_bias in (True, False)
        for is_trained in (True, False)
    ]
    expected = [outcome(plain, x, list(plain.parameters())) for plain in models]
    on_the_cpu(Path(folder))
    import transformer_engine.pytorch as te

    found = [outcome(adopted(te, plain), x, list(plain.parameters())) for plain in models]
    errors = [
        ((theirs - ours).abs().max() / ours.abs().max()).item()
        for theirs_of_model, ours_of_model in zip(found, expected, strict=True)
        for theirs, ours in zip(theirs_of_model, ours_of_model, strict=True)
    ]
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])
