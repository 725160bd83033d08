"""What is counted of the routing: tokens of each expert and of each rank, once each, without reading anything back."""

from __future__ import annotations

import math

import pytest
import torch
from ranks.models import batches, build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.balance.routed import RoutedTokens
from expertmesh.errors import ModelError
from expertmesh.experts import find_experts
from expertmesh.observe import ExpertLoad


def rerouted():
    """A model, in layer 1 both slots of every token on expert 0, in layer 2 all experts alike; and what it is fed."""
    model = build()
    first, second = find_experts(model).values()
    first.register_forward_pre_hook(lambda _, args: (args[0], torch.zeros_like(args[1]), args[2]))
    even = lambda index: torch.arange(index.numel()).view_as(index) % 8  # noqa: E731
    second.register_forward_pre_hook(lambda _, args: (args[0], even(args[1]), args[2]))
    return model, {"input_ids": batches(1, 4, 8)[0], "labels": batches(1, 4, 8)[0]}


def test_imbalance_is_the_busiest_expert_over_the_mean_averaged_over_layers():
    model, tokens = rerouted()
    load = ExpertLoad(model)
    model(**tokens)
    assert load.imbalance() == pytest.approx((8 + 1) / 2)


def test_a_token_counts_once_for_each_of_its_experts_and_once_for_each_rank_that_has_one():
    model, tokens = rerouted()
    load = ExpertLoad(model, ep_size=2)
    model(**tokens)
    first, second = load.read().values()
    # 32 tokens with two experts each; in layer 2 these are neighbours, of which one rank has both.
    assert (first.experts.tolist(), first.ranks.tolist()) == ([64] + [0] * 7, [32, 0])
    assert (second.experts.tolist(), second.ranks.tolist()) == ([8] * 8, [16, 16])
    assert first.imbalance == 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted_again(reentrant):
    model, tokens = rerouted()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    load = ExpertLoad(model)
    calls = []
    find_experts(model)["model.layers.0.mlp.experts"].register_forward_pre_hook(lambda *_: calls.append(1))
    model(**tokens).loss.backward()
    assert len(calls) == 2, "nothing was recomputed"
    assert [layer.experts.sum().item() for layer in load.read().values()] == [64, 64]


def test_counting_starts_anew_and_evaluation_does_not_count():
    model, tokens = rerouted()
    load = ExpertLoad(model)
    model(**tokens)
    load.imbalance()
    model.eval()
    model(**tokens)
    assert math.isnan(load.imbalance())


class WaitsForTheDevice(TorchDispatchMode):
    """Notes the operators whose result, or its shape, the host has to wait for."""

    OPERATORS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "masked_select", "histogram")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.OPERATORS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_counting_waits_for_nothing():
    counter = RoutedTokens(4)
    with WaitsForTheDevice() as waits:
        counter.add(torch.tensor([[0, 1], [1, 3]]))
        counter.add_once(torch.tensor([[0, 0], [1, 3]]))
    assert not waits.found
    assert counter.take().tolist() == [2, 3, 0, 2]


def test_a_dense_model_has_no_imbalance():
    load = ExpertLoad(nn.Linear(2, 2))
    assert load.read() == {}
    assert math.isnan(load.imbalance())


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ModelError, match="has 8 experts, which ep_size 3 does not divide"):
        ExpertLoad(build(), ep_size=3)
