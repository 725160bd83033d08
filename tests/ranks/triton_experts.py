"""The Triton kernels against PyTorch: run by `test_kernels.py`, on a GPU or interpreted; prints one JSON object.

Each value is an error: relative, of the worst of output and gradients, for experts as a whole; in units in the last
place for one kernel in bfloat16.
"""

from __future__ import annotations

import json
import warnings

import torch
from test_compute import LAYOUTS, TOKENS, gradients, routing, run_on_rows, run_ours
from torch import Tensor
from torch.nn import functional as F

from expertmesh.compute.triton.between import TritonBetween
from expertmesh.dispatch.rows import ExpertRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Below a block, several of them, and one that no block divides.
WIDTHS = (8, 24, 2500)
FAMILIES = ("qwen3_moe", "mixtral")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest distance of bfloat16 numbers from what they should be before rounding, in units in the last place."""
    assert found.dtype == torch.bfloat16
    place = torch.exp2(expected.abs().clamp_min(1e-30).log2().floor() - 7)
    return ((found.double() - expected).abs() / place).max().item()


def experts_errors(family: str) -> dict[str, float]:
    """All of the experts, forward and backward, as rows of tokens and as rows with gaps and NaN behind the last."""
    experts = LAYOUTS[family]().to(DEVICE)
    hidden = random(TOKENS, 32, seed=2)
    errors = {}
    for kind in ("even", "one-expert", "few-experts"):
        index, weights = (tensor.to(DEVICE) for tensor in routing(kind))
        inputs = hidden, index, weights
        expected = gradients(experts, lambda *each: run_ours(experts, "loop", *each), *inputs)
        for name, run in (("tokens", run_ours), ("rows", run_on_rows)):
            found = gradients(experts, lambda *each, run=run: run(experts, "triton", *each), *inputs)
            errors[f"{family} {kind} {name}"] = max(relative(found[each], expected[each]) for each in expected)
    return errors


def nothing_at_all() -> float:
    experts = LAYOUTS["qwen3_moe"]().to(DEVICE)
    inputs = random(0, 32), torch.zeros(0, 3, dtype=torch.long, device=DEVICE), random(0, 3)
    found = gradients(experts, lambda *each: run_ours(experts, "triton", *each), *inputs)
    assert found["output"].shape == (0, 32)
    return max((value.abs().max().item() for value in found.values() if value.numel()), default=0.0)


def gate_errors(width: int) -> dict[str, float]:
    """On rows and weights that lie apart, against PyTorch's own derivative in float64."""
    projected = random(5, 2 * width + 6, seed=1).bfloat16()[:, : 2 * width]
    grad = random(5, width, seed=2).bfloat16()
    weights = random(5, 2, seed=3)[:, :1]
    exact = projected.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    activation = F.silu(gate) * up
    activation.backward(grad.double() * weights.double())
    row_weights = (grad.double() * activation).sum(1).detach()
    between = TritonBetween()
    plain = between.activation(projected)
    found = between.gate_gradients(projected, grad, weights, True)
    return {
        f"activation {width}": ulps(plain, activation.detach()),
        f"gradient of the projection {width}": ulps(found.projected, exact.grad),
        f"weighted activation {width}": ulps(found.weighted_activation, (activation * weights).detach()),
        # In float32.
        f"gradient of the weights {width}": relative(found.row_weights.double(), row_weights) / 1e-6,
    }


def total_errors(width: int) -> dict[str, float]:
    """Of tokens with none, one and many rows, against a sum in float64; twice the same bits."""
    token_index = torch.tensor([0, 2, 3, 0, 3, 3], device=DEVICE)
    rows = ExpertRows(token_index, None, torch.tensor([3, 3, 5, 6], dtype=torch.int32, device=DEVICE), 6)
    values = random(6, width + 3, seed=4).bfloat16()[:, :width]
    weights = random(6, 2, seed=5)[:, :1]
    expected = torch.zeros(5, width, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, token_index, values.double() * weights.double())
    (part,) = rows.split([6])

    def summed() -> Tensor:
        total = TritonBetween().total(rows, values.new_empty(5, width))
        total.add(part, values, weights)
        return total.result()

    assert torch.equal(summed(), summed())
    return {f"total {width}": ulps(summed(), expected)}


def main() -> None:
    warnings.simplefilter("ignore")
    errors = {"nothing": nothing_at_all()}
    for family in FAMILIES:
        errors |= experts_errors(family)
    for width in WIDTHS:
        errors |= gate_errors(width) | total_errors(width)
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
