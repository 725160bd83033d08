"""Which elements of a tensor a shard is, and the checksum of a whole from those of its parts."""

from __future__ import annotations

import itertools
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import TESTS, run_ranks

from expertmesh.checkpoint.boxes import Box, box_of, contiguous_runs, is_primary
from expertmesh.checkpoint.checksum import RunChecksum, combine, combine_runs

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


@st.composite
def shape_and_boxes(draw, count):
    shape = draw(SHAPES)
    return shape, *(draw(boxes(shape)) for _ in range(count))


# Boxes


@settings(deadline=None)
@given(shape_and_boxes(1))
def test_runs_are_the_elements_of_the_box_in_order_and_as_long_as_can_be(case):
    shape, box = case
    runs = list(contiguous_runs(shape, box))
    elements = [first + step for first, count in runs for step in range(count)]
    assert elements == np.arange(math.prod(shape)).reshape(shape)[box.slices].flatten().tolist()
    assert all(first + count < after for (first, count), (after, _) in itertools.pairwise(runs))


@settings(deadline=None)
@given(shape_and_boxes(2))
def test_intersection_is_what_both_have(case):
    shape, one, other = case
    counts = np.zeros(shape, int)
    counts[one.slices] += 1
    counts[other.slices] += 1
    common = one.intersect(other)
    assert common == other.intersect(one)
    assert (0 if common is None else common.numel) == (counts == 2).sum()
    if common is not None:
        assert (counts[common.slices] == 2).all()
        whole = np.arange(math.prod(shape)).reshape(shape)
        assert (whole[one.slices][common.within(one).slices] == whole[common.slices]).all()


def test_a_box_outside_is_no_negative_index():
    with pytest.raises(ValueError, match="not inside"):
        Box((0, 2), (2, 2)).within(Box((1, 0), (4, 4)))
    with pytest.raises(ValueError, match="not inside"):
        Box((3,), (3,)).within(Box((1,), (4,)))


def test_a_contiguous_box_of_a_large_tensor_is_one_run():
    assert list(contiguous_runs((1 << 20, 1 << 20), Box((7, 0), (1 << 19, 1 << 20)))) == [(7 << 20, 1 << 39)]


def test_a_plain_tensor_is_whole_and_this_process_writes_it():
    assert box_of(torch.zeros(2, 3)) == Box((0, 0), (2, 3))
    assert box_of(torch.tensor(1.0)) == Box((), ())
    assert is_primary(torch.zeros(2))


def test_boxes_of_fsdp_over_ep_tile_every_tensor_once():
    ranks = run_ranks(TESTS / "ranks" / "boxes.py", 4)
    assert [rank.stdout.strip() for rank in ranks] == ["ok"] * 4


# Checksums


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_crc_is_that_of_the_concatenation(one, other):
    assert combine(zlib.crc32(one), zlib.crc32(other), len(other)) == zlib.crc32(one + other)


def test_lengths_past_32_bits():
    block, count = bytes(1 << 20), 5 << 10
    of_block, crc, length = zlib.crc32(block), 0, 0
    for _ in range(count):
        crc, length = combine(crc, of_block, len(block)), length + len(block)
    assert length > 1 << 32
    head = zlib.crc32(b"head")
    crc_by_blocks = head
    for _ in range(count):
        crc_by_blocks = combine(crc_by_blocks, of_block, len(block))
    assert combine(head, crc, length) == crc_by_blocks


@st.composite
def tilings(draw):
    data = draw(st.binary(min_size=1, max_size=200))
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=6))})
    runs = [RunChecksum("w", a, b - a, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(cuts)]
    replicas = draw(st.lists(st.sampled_from(runs), max_size=3))
    return data, runs, draw(st.permutations(runs + replicas))


@settings(deadline=None)
@given(tilings())
def test_runs_in_any_order_with_replicas_are_the_whole(tiling):
    data, _, reported = tiling
    assert combine_runs(reported, len(data)) == zlib.crc32(data)


@settings(deadline=None)
@given(tilings(), st.data())
def test_runs_that_do_not_tile_have_no_sum(tiling, data):
    whole, runs, _ = tiling
    lost = data.draw(st.sampled_from(runs))
    others = [run for run in runs if run != lost]
    assert combine_runs(others, len(whole)) is None
    assert combine_runs([*runs, RunChecksum("w", lost.start, lost.length, lost.crc ^ 1)], len(whole)) is None
    assert combine_runs([*others, RunChecksum("w", lost.start, lost.length + 1, 0)], len(whole)) is None
    assert combine_runs(runs, len(whole) + 1) is None


def test_nothing_has_the_sum_of_no_bytes():
    assert combine_runs([], 0) == zlib.crc32(b"") == 0
