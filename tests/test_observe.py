"""The imbalance that the progress bar shows."""

from __future__ import annotations

import math

import pytest
import torch
from ranks.models import batches, build
from torch import nn

from expertmesh.experts import find_experts
from expertmesh.observe import ExpertLoad


def test_imbalance_is_the_busiest_expert_over_the_mean_averaged_over_layers():
    model = build()
    first, second = find_experts(model).values()
    # Layer 1: both slots of every token on expert 0, so 8 times the mean. Layer 2: all experts alike.
    first.register_forward_pre_hook(lambda _, args: (args[0], torch.zeros_like(args[1]), args[2]))
    even = lambda index: torch.arange(index.numel()).view_as(index) % 8  # noqa: E731
    second.register_forward_pre_hook(lambda _, args: (args[0], even(args[1]), args[2]))
    load = ExpertLoad(model)
    model(input_ids=batches(1, 4, 8)[0])
    assert load.imbalance() == pytest.approx((8 + 1) / 2)


def test_counting_starts_anew_and_evaluation_does_not_count():
    model = build()
    load = ExpertLoad(model)
    model(input_ids=batches(1, 2, 8)[0])
    load.imbalance()
    model.eval()
    model(input_ids=batches(1, 2, 8)[0])
    assert math.isnan(load.imbalance())


def test_a_dense_model_has_no_imbalance():
    assert math.isnan(ExpertLoad(nn.Linear(2, 2)).imbalance())
