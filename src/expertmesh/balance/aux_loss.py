"""The load-balancing loss of Transformers' models, over the tokens of all ranks.

For `E` experts and `N` rows (one for each token and layer), `n_e` choices of expert `e` and `p_e` its summed
probability: `loss = E * sum_e (n_e / N) * (p_e / N)`. It is a product of means: with two ranks that send all their
tokens to one expert each, expert 0 and expert 1 of 2, and are sure of it, either rank's own loss is 2, while the global
batch is balanced and its loss is 1. So `n`, `p` and `N` are summed over the ranks before they are multiplied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from expertmesh.balance.loss_use import loss_use
from expertmesh.balance.ranks import sum_over_ranks

_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def global_balancing_loss(
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """The loss of the tokens of all ranks, differentiable through this rank's probabilities. Collective.

    Has the signature of Transformers' `load_balancing_loss_func`.

    Args:
        gate_logits: for each layer `[tokens, num_experts]`.
        num_experts: `E`.
        top_k: experts a token is sent to.
        attention_mask: `[batch, sequence]`, zero at tokens that do not count.

    Returns:
        A float32 scalar, divided by what the model's loss will be multiplied with (see `loss_use`); 0 without logits.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    sums = _sums(gate_logits, num_experts, top_k, attention_mask)
    return _loss(sum_over_ranks(sums)) / loss_use().multiplied


def computes_the_same(original: Callable[..., Tensor | int]) -> bool:
    """Whether a model's own loss function is, on one rank, the one computed here."""
    if list(inspect.signature(original).parameters) != _PARAMETERS:
        return False
    with unset_fake_temporarily():
        generator = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(6, 5, generator=generator) for _ in range(2))
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        return all(
            torch.allclose(original(logits, 5, 2, given), _loss(_sums(logits, 5, 2, given))) for given in (None, mask)
        )


def _sums(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None) -> Tensor:
    """`n`, `p` and `N` of this rank, one after the other, float32 `[2 * num_experts + 1]`."""
    device = gate_logits[0].device
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    choices = torch.zeros(num_experts, device=device)
    probabilities = torch.zeros(num_experts, device=device)
    rows = torch.zeros(1, device=device)
    for logits in gate_logits:
        routing = torch.softmax(logits.to(device), dim=-1)
        chosen = routing.topk(top_k, dim=-1).indices
        counted = torch.ones(len(routing), device=device) if mask is None else mask
        choices.scatter_add_(0, chosen.reshape(-1), counted.repeat_interleave(top_k))
        probabilities = probabilities + (routing.float() * counted.unsqueeze(1)).sum(0)
        rows += counted.sum()
    return torch.cat([choices, probabilities, rows])


def _loss(sums: Tensor) -> Tensor:
    rows = sums[-1]
    choices, probabilities = (sums[:-1] / rows).chunk(2)
    return (choices.detach() * probabilities).sum() * len(choices)
