"""A checkpoint that is written in the background: training goes on, and it holds the moment it was taken."""

from __future__ import annotations

from processes import TESTS, run_ranks


def test_training_goes_on_and_failures_are_raised_later(tmp_path):
    run_ranks(TESTS / "ranks" / "checkpoint_background.py", 2, tmp_path, timeout=120)
