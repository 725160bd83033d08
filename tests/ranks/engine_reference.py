"""What every engine's transport has to do, checked on each rank against arithmetic that moves nothing.

Each expert multiplies its tokens with a vector of its own. Every rank knows all ranks' tokens, which come from seeds,
so it can say what comes back and which gradients do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.dispatch import ops
from expertmesh.dispatch.transport import Situation, Transport
from expertmesh.dispatch.transported import TransportDispatcher, Underway


@dataclass(frozen=True)
class Scenario:
    """One routing, for which every rank has tokens of its own.

    Attributes:
        tokens: of each rank; the list is repeated for more ranks.
        experts: on each rank.
        top_k: experts of a token.
        choose: from random scores `[tokens, E]` to the scores by which the top are taken.
    """

    tokens: tuple[int, ...] = (7, 5, 12, 3)
    experts: int = 4
    top_k: int = 3
    choose: Callable[[Tensor], Tensor] = lambda scores: scores


def only_first_rank(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, :4] += 10
    return scores


def one_expert(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, 5] += 10
    return scores


SCENARIOS = {
    "uneven": Scenario(),
    "a rank without tokens": Scenario(tokens=(6, 0, 3, 0)),
    "no tokens at all": Scenario(tokens=(0,)),
    "a rank that receives none": Scenario(choose=only_first_rank),
    "all to one expert": Scenario(choose=one_expert, top_k=1),
    "one expert a rank": Scenario(experts=1, top_k=2),
    "more choices than local experts": Scenario(experts=2, top_k=4),
}


def situation(scenario: Scenario, hidden: int, dtype: torch.dtype = torch.float32) -> Situation:
    size = dist.get_world_size()
    return Situation(
        ep_size=size, num_experts=size * scenario.experts, hidden=hidden, dtype=dtype, device=torch.device("cpu")
    )


def inputs(scenario: Scenario, rank: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens `[T, H]`, top-k indices and weights `[T, K]`."""
    generator = torch.Generator().manual_seed(100 + rank)
    num_tokens = scenario.tokens[rank % len(scenario.tokens)]
    num_experts = scenario.experts * dist.get_world_size()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    index = scenario.choose(scores).topk(scenario.top_k, dim=1).indices
    tokens = torch.randn(num_tokens, hidden, generator=generator)
    return tokens, index, torch.rand(num_tokens, scenario.top_k, generator=generator) + 0.1


def factors(num_experts: int, hidden: int) -> Tensor:
    """What each expert multiplies with, `[E, H]`."""
    return torch.randn(num_experts, hidden, generator=torch.Generator().manual_seed(7))


def expected(scenario: Scenario, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and the gradients of tokens, routing weights and all experts' factors, of the sum of squares."""
    size, outcome = dist.get_world_size(), None
    scale = factors(scenario.experts * size, hidden).requires_grad_()
    total = torch.zeros(())
    for rank in range(size):
        tokens, index, weights = inputs(scenario, rank, hidden)
        tokens.requires_grad_()
        weights.requires_grad_()
        output = (tokens.unsqueeze(1) * scale[index] * weights.unsqueeze(2)).sum(1)
        total = total + output.square().sum()
        if rank == dist.get_rank():
            outcome = (output, tokens, weights)
    output, tokens, weights = outcome
    return output.detach(), *torch.autograd.grad(total, [tokens, weights, scale])


def run(
    transport: Transport, scenario: Scenario, hidden: int, repeat: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same through an engine; `repeat` sends the tokens that many times along one route, as recomputations do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, index, weights = inputs(scenario, rank, hidden)
    tokens = tokens.to(dtype).requires_grad_()
    weights.requires_grad_()
    mine = factors(scenario.experts * size, hidden)[rank * scenario.experts : (rank + 1) * scenario.experts]
    mine.requires_grad_()
    dispatcher = TransportDispatcher(transport)
    started = dispatcher.start_dispatch(tokens, index, weights)
    for _ in range(repeat - 1):
        dispatcher.finish_dispatch(started)
        again = ops.send(tokens, index, weights, started.route, dispatcher._handle)
        started = Underway(started.route, again)
    arrived = dispatcher.finish_dispatch(started)
    rows = arrived.rows
    row = torch.arange(rows.num_rows)
    expert = torch.searchsorted(rows.offsets.long(), row, right=True).clamp(max=scenario.experts - 1)
    real = rows.belongs_to_expert()
    token = arrived.tokens if rows.token_index is None else arrived.tokens[rows.token_index]
    token = torch.where(real, token, 0)
    weighted = token.float() * mine[expert] * torch.where(real, arrived.row_weights.unsqueeze(1), 0)
    if rows.token_index is None:
        # What lies behind the last expert's rows is nobody's; let it be noticed if somebody takes it.
        output = torch.where(real, weighted, float("nan"))
    else:
        output = torch.zeros(arrived.tokens.shape).index_add(0, rows.token_index, weighted)
    result = dispatcher.combine(output.to(dtype), arrived.state).float()
    result.square().sum().backward()
    return result.detach(), tokens.grad, weights.grad, mine.grad


def check(
    transport: Transport,
    scenario: Scenario,
    hidden: int,
    repeat: int = 1,
    tolerance: float = 2e-6,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise AssertionError unless an engine does what has to be done."""
    output, grad_tokens, grad_weights, grad_factors = expected(scenario, hidden)
    rank = dist.get_rank()
    grad_factors = grad_factors[rank * scenario.experts : (rank + 1) * scenario.experts]
    truth = {"output": output, "tokens": grad_tokens, "weights": grad_weights, "experts": grad_factors}
    found = run(transport, scenario, hidden, repeat, dtype)
    for (name, value), ours in zip(truth.items(), found, strict=True):
        if value.numel() == 0 or (ours is None and not value.any()):
            continue
        assert ours is not None, f"{name}: no gradient"
        error = (ours - value).abs().max() / value.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
