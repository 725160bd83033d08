"""A block that is recomputed uses the experts that its forward used, and tokens are not routed twice.

The nearly tied model's gradients may differ by what the nudged routing weights make of them, 1e-5 of the largest entry.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from processes import TESTS, run_ranks

LAYERS = 2


@cache
def results():
    rank_0, _ = run_ranks(TESTS / "ranks" / "recompute.py", 2)
    return json.loads(rank_0.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("how", "sends"),
    [("full", 2), ("selective", 1), ("enabled before", 2), ("enabled after", 2)],
)
def test_near_ties_are_decided_once(how, sends):
    outcome = results()[how]
    assert outcome["error"] is None
    assert outcome["loss"] == 0 and outcome["worst"] < 1e-5
    calls = outcome["calls"]
    assert calls["nudges"] == LAYERS, "every block was recomputed"
    assert calls["plan"] == results()["none"]["plan"] == LAYERS
    assert calls["send"] == sends * LAYERS
    assert calls["send gradients"] == LAYERS


def test_only_the_experts_are_recomputed_where_only_they_should_be():
    outcome = results()["experts_only"]
    assert outcome["error"] is None and outcome["loss"] == 0 and outcome["worst"] < 1e-6
    calls = outcome["calls"]
    assert "nudges" not in calls, "no router ran again"
    assert calls["plan"] == LAYERS and calls["send"] == 2 * LAYERS and calls["send gradients"] == LAYERS


def test_without_it_other_experts_would_be_chosen():
    outcome = results()["unprotected"]
    assert outcome["calls"]["plan"] > LAYERS
    assert outcome["error"] or outcome["worst"] > 0.1
