"""A traced tensor knows where its elements come from: rebuilt from its pieces it is what the operations give."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.checkpoint.boxes import Box
from expertmesh.checkpoint.pieces import Piece, in_chunks
from expertmesh.checkpoint.trace import TracedTensor

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def strides_of(shape):
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def elements(piece: Piece, source: torch.Tensor) -> torch.Tensor:
    strides = strides_of(source.shape)
    first = sum(at * stride for at, stride in zip(piece.source_offset, strides, strict=True))
    return source.flatten().as_strided(piece.shape, piece.strides_in(strides), first)


def rebuilt(traced: TracedTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    result = torch.full(traced.shape, -1, dtype=torch.int64)
    for piece in traced.pieces:
        region = result[piece.box.slices]
        assert (region == -1).all(), "pieces overlap"
        region.copy_(elements(piece, sources[piece.source]))
    return result


def factors(draw, number):
    """A shape with `number` elements."""
    shape = []
    for prime in (2, 2, 2, 3, 3):
        if number % prime == 0 and draw(st.booleans()):
            shape.append(prime)
            number //= prime
    return [*shape, number]


def one_step(draw, tensor):
    """One random operation, to be done alike to the real tensor and to the traced one."""
    dim = draw(st.integers(-tensor.ndim, tensor.ndim - 1)) if tensor.ndim else None
    choices = ["reshape", "unsqueeze", "stack"]
    if dim is not None:
        choices += ["transpose", "slice", "select", "cat", "chunk", "unbind", "permute", "squeeze"]
    kind = draw(st.sampled_from(choices))
    if kind == "reshape":
        shape = factors(draw, tensor.numel())
        return lambda t: t.reshape(shape)
    if kind == "unsqueeze":
        at = draw(st.integers(0, tensor.ndim))
        return lambda t: t.unsqueeze(at)
    if kind == "stack":
        return lambda t: torch.stack([t, t], 0) if tensor.numel() < 500 else t
    if kind == "transpose":
        other = draw(st.integers(0, tensor.ndim - 1))
        return lambda t: t.transpose(dim, other).contiguous()
    if kind == "slice":
        start = draw(st.integers(0, tensor.shape[dim] - 1))
        step = draw(st.integers(1, 3))
        return lambda t: t[(slice(None),) * (dim % t.ndim) + (slice(start, None, step),)]
    if kind == "select":
        index = draw(st.integers(0, tensor.shape[dim] - 1))
        return lambda t: t.select(dim, index)
    if kind == "cat":
        return lambda t: torch.cat([t, t], dim) if tensor.numel() < 500 else t
    if kind == "chunk":
        return lambda t: torch.cat(tuple(reversed(t.chunk(2, dim))), dim)
    if kind == "unbind":
        return lambda t: torch.stack(t.unbind(dim)[::-1], dim)
    if kind == "squeeze":
        return lambda t: t.squeeze(dim)
    order = draw(st.permutations(range(tensor.ndim)))
    return lambda t: t.permute(order)


@st.composite
def chains(draw):
    """A random chain of operations on two sources: what they really give, and the trace of it."""
    shape = draw(SHAPES)
    number = math.prod(shape)
    sources = {
        "a": torch.arange(number).reshape(shape),
        "b": torch.arange(1000, 1000 + number).reshape(shape),
    }
    real = torch.cat([sources["a"], sources["b"]])
    traced = torch.cat([TracedTensor.of(name, tensor.shape, tensor.dtype) for name, tensor in sources.items()])
    for _ in range(draw(st.integers(0, 5))):
        step = one_step(draw, real)
        real, traced = step(real), step(traced)
    return sources, real, traced


@given(chains())
@settings(max_examples=200, deadline=None)
def test_any_chain_of_moves_is_followed(chain):
    sources, real, traced = chain
    assert traced.pieces is not None and tuple(traced.shape) == tuple(real.shape)
    assert torch.equal(rebuilt(traced, sources), real)


@given(chains(), st.data())
@settings(max_examples=100, deadline=None)
def test_any_box_of_it_is_made_of_the_parts_of_its_pieces(chain, data):
    sources, real, traced = chain
    starts = [data.draw(st.integers(0, extent - 1)) for extent in real.shape]
    extents = [data.draw(st.integers(1, end - start)) for start, end in zip(starts, real.shape, strict=True)]
    box = Box(tuple(starts), tuple(extents))
    parts = [part for piece in traced.pieces if (part := piece.cut(box)) is not None]
    assert sum(part.box.numel for part in parts) == box.numel
    for part in parts:
        assert torch.equal(elements(part, sources[part.source]), real[part.box.slices])
        chunks = list(in_chunks(part, 3))
        assert sum(chunk.box.numel for chunk in chunks) == part.box.numel
        assert all(chunk.box.numel <= 3 for chunk in chunks)


@given(chains(), st.data())
@settings(max_examples=100, deadline=None)
def test_what_a_rank_holds_of_the_source_gives_just_its_part(chain, data):
    sources, real, traced = chain
    shape = sources["a"].shape
    dim = data.draw(st.integers(0, len(shape) - 1))
    middle = data.draw(st.integers(0, shape[dim]))
    seen = torch.zeros(real.shape, dtype=torch.int64)
    for start, stop in ((0, middle), (middle, shape[dim])):
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        held = Box(offset, tuple(stop - start if d == dim else extent for d, extent in enumerate(shape)))
        for piece in traced.pieces:
            if not piece.invertible or held.numel == 0:
                continue
            part = piece.cut_in_source(held)
            if part is not None:
                assert part.source_box().intersect(held) == part.source_box(), "only what the rank holds"
                seen[part.box.slices] += 1
    invertible = [piece for piece in traced.pieces if piece.invertible]
    assert seen.sum() == sum(piece.box.numel for piece in invertible) and seen.max() <= 1


def test_what_computes_is_opaque_and_remembers_its_sources():
    a, b = (TracedTensor.of(name, (4, 2), torch.float32) for name in "ab")
    result = torch.cat([a, b])[2:] * 2
    assert result.opaque and result.sources == {"a", "b"} and result.shape == (6, 2)
    assert torch.stack([result, result]).opaque


def test_a_conversion_that_shreds_a_tensor_is_run_on_whole_tensors(monkeypatch):
    monkeypatch.setattr("expertmesh.checkpoint.trace._MOST_PIECES", 4)
    pieces = [row for row in TracedTensor.of("a", (6, 2), torch.float32)]
    assert torch.stack(pieces[:4]).pieces is not None
    assert torch.stack(pieces).opaque and torch.stack(pieces).sources == {"a"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_casts_and_copies_change_the_dtype_only(dtype):
    a = TracedTensor.of("a", (3, 4), torch.float16)
    cast = a[...].to(device="cpu", dtype=dtype).clone()
    assert cast.dtype == dtype and cast.pieces == a.pieces
