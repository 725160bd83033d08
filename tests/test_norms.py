"""Norms that keep less compute what the model's own compute, bit for bit, and their derivatives are no worse."""

import copy

import pytest
import torch
from ranks.models import FAMILIES, build
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNorm

from expertmesh.norms import find_rms_norms, keep_less

WIDTH = 96
RECOGNISED = {"llama": MixtralRMSNorm, "olmo": OlmoHybridRMSNorm, "helium": HeliumRMSNorm, "gemma": GemmaRMSNorm}


def pair(kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A family's own norm, and the same keeping less."""
    torch.manual_seed(0)
    own = RECOGNISED[kind](WIDTH, 1e-6)
    own.weight.data.normal_()
    own.to(dtype)
    lean = copy.deepcopy(own)
    assert keep_less(lean) == [""]
    return own, lean


def outcome(norm: nn.Module, hidden: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = hidden.clone().requires_grad_()
    output = norm(hidden)
    output.backward(grad.to(output.dtype))
    return output.detach(), hidden.grad, norm.weight.grad


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, grad = (torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return hidden, grad


@pytest.mark.parametrize("kind", RECOGNISED)
def test_the_output_is_equal_and_gradients_to_float32s_rounding(kind):
    ours, theirs = (outcome(norm, *inputs(torch.float32)) for norm in reversed(pair(kind, torch.float32)))
    assert torch.equal(ours[0], theirs[0])
    for mine, expected in zip(ours[1:], theirs[1:], strict=True):
        assert (mine - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("kind", RECOGNISED)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_equal_in_the_forward_and_no_worse_in_the_backward(kind, weight_dtype):
    hidden, grad = inputs(torch.bfloat16)
    own, lean = pair(kind, weight_dtype)
    exact = outcome(copy.deepcopy(own).double(), hidden.double(), grad.double())
    ours, theirs = outcome(lean, hidden, grad), outcome(own, hidden, grad)
    assert ours[0].dtype == theirs[0].dtype and torch.equal(ours[0], theirs[0])
    for mine, expected, true in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert mine.dtype == expected.dtype
        assert (mine - true).norm() <= 1.05 * (expected - true).norm()


def test_the_input_and_a_number_a_row_are_kept():
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    _, lean = pair("llama", torch.bfloat16)
    hidden = inputs(torch.bfloat16)[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lean(hidden)
    assert sorted(kept, key=str) == [
        ((2, 5, 1), torch.float32),
        ((2, 5, WIDTH), torch.bfloat16),
        ((WIDTH,), torch.bfloat16),
    ]


def test_a_frozen_weight_gets_no_gradient():
    _, lean = pair("gemma", torch.float32)
    lean.weight.requires_grad_(False)
    hidden, grad = inputs(torch.float32)
    hidden.requires_grad_()
    lean(hidden).backward(grad)
    assert lean.weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_norms_are_recognised(family):
    model = build(family)
    norms = {name for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}
    assert {name for name, _ in find_rms_norms(model)} == norms != set()


def test_what_is_no_plain_rms_norm_is_left_alone():
    class Twice(MixtralRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    hooked = MixtralRMSNorm(WIDTH)
    hooked.forward = hooked.forward
    others = nn.ModuleList(
        [Twice(WIDTH), MambaRMSNormGated(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), hooked]
    )
    assert keep_less(others) == []
