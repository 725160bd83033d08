"""Our `Linear` and `RMSNorm` as heirs of Transformer Engine's own: what they compute, hold, and call themselves.

Prints the relative errors of the output and of all gradients of `Linear`, and what else was found. Run with the folder
of the wheel.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import expertmesh_plugins.transformer_engine  # noqa: F401 -- it looks for GPUs, and there are none as yet
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from expertmesh.norms import find_rms_norms
from te_fidelity.gemm import on_the_cpu
from te_fidelity.linear import outcome


def main(folder: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 32, requires_grad=True)
    plain = [nn.Linear(32, 24, bias=has_bias) for has_bias in (True, False)]
    expected = [outcome(linear, x, list(linear.parameters())) for linear in plain]
    holder = nn.ModuleList([GemmaRMSNorm(32, eps=1e-3)])
    ((_, norm),) = find_rms_norms(holder)
    on_the_cpu(Path(folder))
    package = "expertmesh_plugins.transformer_engine"
    ours = [import_module(f"{package}.linear").Linear(linear, None) for linear in plain]
    theirs = import_module("transformer_engine.pytorch")
    found = [outcome(linear, x, list(linear.parameters())) for linear in ours]
    our_norm = import_module(f"{package}.norm").RMSNorm(norm)
    print(
        json.dumps(
            {
                "errors": [
                    ((a - b).abs().max() / b.abs().max()).item()
                    for pair in zip(found, expected, strict=True)
                    for a, b in zip(*pair, strict=True)
                ],
                "keys": [list(module.state_dict()) for module in (*ours, our_norm)],
                "same": all(a.weight is b.weight and a.bias is b.bias for a, b in zip(ours, plain, strict=True)),
                "same norm": our_norm.weight is holder[0].weight,
                "norm": [our_norm.eps, our_norm.zero_centered_gamma],
                "is linear": all(isinstance(each, nn.Linear) and isinstance(each, theirs.Linear) for each in ours),
                "loads": [str(a.load_state_dict(b.state_dict())) for a, b in zip(ours, plain, strict=True)],
                "gives": [str(b.load_state_dict(a.state_dict())) for a, b in zip(ours, plain, strict=True)],
                "text": repr(ours[1]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
