"""Tokens arrive where their experts are, once a rank, and come back; gradients travel the same way."""

from __future__ import annotations

from processes import TESTS, run_ranks


def test_uneven_ranks_equal_experts_that_are_all_local():
    ranks = run_ranks(TESTS / "ranks" / "dispatch.py", 4)
    assert [rank.stdout.strip() for rank in ranks] == ["ok"] * 4
