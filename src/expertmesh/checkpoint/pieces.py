"""Where the elements of a tensor come from, when it was put together out of others by moving elements about.

A tensor is a set of `Piece`s, boxes that do not overlap. Within a piece, the index into the source is an affine
function of the index into the tensor: walking along one dimension of the piece walks along at most one dimension of the
source. Slicing, concatenating, transposing and reshaping take pieces to pieces, so a whole chain of them can be
followed without moving one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from expertmesh.checkpoint.boxes import Box


@dataclass(frozen=True)
class Piece:
    """A box of a tensor whose elements are those of a strided region of a source tensor.

    The element at `offset + i` of the tensor is the source's element at index
    `source_offset[d] + sum(steps[k] * i[k] for every k with dims[k] == d)` in each source dimension `d`.

    Attributes:
        source: name of the source tensor.
        offset: first index of the box in the tensor.
        shape: extent of the box.
        source_offset: index of the first element in the source.
        dims: for each dimension of the box the source dimension it runs along, or None where it has one element.
        steps: how far one step along a dimension of the box moves in the source.
    """

    source: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    source_offset: tuple[int, ...]
    dims: tuple[int | None, ...]
    steps: tuple[int, ...]

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> Piece:
        """The source itself."""
        rank = range(len(shape))
        dims = tuple(d if shape[d] > 1 else None for d in rank)
        zeros = (0,) * len(shape)
        return cls(source, zeros, tuple(shape), zeros, dims, tuple(int(d is not None) for d in dims))

    @property
    def box(self) -> Box:
        """The box in the tensor."""
        return Box(self.offset, self.shape)

    @property
    def invertible(self) -> bool:
        """Whether each source dimension is run along by at most one dimension of the piece, forwards."""
        run = [dim for dim in self.dims if dim is not None]
        return len(run) == len(set(run)) and all(step >= 0 for step in self.steps)

    def cut(self, box: Box) -> Piece | None:
        """The part of the piece inside `box` (in the tensor's coordinates); None if there is none."""
        common = self.box.intersect(box)
        if common is None:
            return None
        piece = self
        for dim in range(len(self.shape)):
            piece = piece._sliced(dim, common.offset[dim], common.shape[dim])
        return piece

    def cut_in_source(self, box: Box) -> Piece | None:
        """The part of an invertible piece whose source elements lie inside `box` (in the source's coordinates)."""
        piece = self
        along = {dim: k for k, dim in enumerate(self.dims) if dim is not None}
        for dim, (start, stop) in enumerate(zip(box.offset, box.stop, strict=True)):
            first = self.source_offset[dim]
            if dim not in along:
                if not start <= first < stop:
                    return None
                continue
            k = along[dim]
            low = max(0, -((first - start) // self.steps[k]))
            high = min(self.shape[k], -((first - stop) // self.steps[k]))
            if low >= high:
                return None
            piece = piece._sliced(k, self.offset[k] + low, high - low)
        return piece

    def source_box(self) -> Box:
        """The smallest box in the source that holds the piece's elements."""
        shape = [1] * len(self.source_offset)
        for dim, step, extent in zip(self.dims, self.steps, self.shape, strict=True):
            if dim is not None:
                shape[dim] += step * (extent - 1)
        return Box(self.source_offset, tuple(shape))

    def strides_in(self, source_strides: Sequence[int]) -> tuple[int, ...]:
        """Strides that walk the piece's elements in a source stored with `source_strides`."""
        return tuple(
            1 if dim is None else source_strides[dim] * step for dim, step in zip(self.dims, self.steps, strict=True)
        )

    def moved(self, dim: int, by: int) -> Piece:
        """The same elements, `by` further along one dimension of the tensor."""
        return replace(self, offset=_with(self.offset, dim, self.offset[dim] + by))

    def permuted(self, order: Sequence[int]) -> Piece:
        """The same elements with the tensor's dimensions in another order."""
        pick = [tuple(values[k] for k in order) for values in (self.offset, self.shape, self.dims, self.steps)]
        return replace(self, offset=pick[0], shape=pick[1], dims=pick[2], steps=pick[3])

    def with_dimension(self, dim: int) -> Piece:
        """A new dimension of extent 1 in front of `dim`."""
        return self._replace_dims(dim, dim, [(0, 1, None, 0)])

    def without_dimension(self, dim: int) -> Piece:
        """Without a dimension in which the piece has one element."""
        return self._replace_dims(dim, dim + 1, [])

    def strided(self, dim: int, start: int, stop: int, step: int) -> Piece | None:
        """What `tensor[..., start:stop:step]` along `dim` keeps of the piece."""
        offset, extent = self.offset[dim], self.shape[dim]
        first = max(0, -((start - offset) // step))
        last = -((start - min(stop, offset + extent)) // step)
        if first >= last:
            return None
        kept = last - first
        piece = self._sliced(dim, start + first * step, (kept - 1) * step + 1)
        return replace(
            piece,
            offset=_with(piece.offset, dim, first),
            shape=_with(piece.shape, dim, kept),
            steps=_with(piece.steps, dim, piece.steps[dim] * step),
        )

    def merged(self, dim: int, extent: int) -> list[Piece]:
        """Dimensions `dim` and `dim + 1` as one; `extent` is the tensor's, not the piece's, in the second."""
        (o1, n1, d1, s1), (o2, n2, d2, s2) = self._along(dim), self._along(dim + 1)
        if n1 == 1:
            return [self._replace_dims(dim, dim + 2, [(o1 * extent + o2, n2, d2, s2)])]
        if n2 == extent == 1:
            return [self._replace_dims(dim, dim + 2, [(o1, n1, d1, s1)])]
        if n2 == extent and d1 == d2 and s1 == s2 * extent:
            return [self._replace_dims(dim, dim + 2, [(o1 * extent, n1 * n2, d2, s2)])]
        rows = (self._sliced(dim, o1 + k, 1) for k in range(n1))
        return [row.merged(dim, extent)[0] for row in rows]

    def divided(self, dim: int, extent: int) -> list[Piece]:
        """One dimension as two, the second of them `extent` long in the tensor."""
        offset, size, source_dim, step = self._along(dim)
        stop = offset + size
        if offset % extent == 0 and size % extent == 0:
            outer = (offset // extent, size // extent, *_run(size // extent, source_dim, step * extent))
            return [self._replace_dims(dim, dim + 1, [outer, (0, extent, *_run(extent, source_dim, step))])]
        if offset // extent == (stop - 1) // extent:
            inner = (offset % extent, size, source_dim, step)
            return [self._replace_dims(dim, dim + 1, [(offset // extent, 1, None, 0), inner])]
        middle = (offset // extent + 1) * extent if offset % extent else stop // extent * extent
        halves = (self._sliced(dim, offset, middle - offset), self._sliced(dim, middle, stop - middle))
        return [piece for half in halves for piece in half.divided(dim, extent)]

    def _along(self, dim: int) -> tuple[int, int, int | None, int]:
        return self.offset[dim], self.shape[dim], self.dims[dim], self.steps[dim]

    def _replace_dims(self, start: int, stop: int, new: Sequence[tuple[int, int, int | None, int]]) -> Piece:
        columns = zip(*new, strict=True) if new else ((), (), (), ())
        values = [
            (*old[:start], *column, *old[stop:])
            for old, column in zip((self.offset, self.shape, self.dims, self.steps), columns, strict=True)
        ]
        return replace(self, offset=values[0], shape=values[1], dims=values[2], steps=values[3])

    def _sliced(self, dim: int, offset: int, extent: int) -> Piece:
        if (offset, extent) == (self.offset[dim], self.shape[dim]):
            return self
        source_dim, source_offset = self.dims[dim], self.source_offset
        if source_dim is not None:
            moved = source_offset[source_dim] + self.steps[dim] * (offset - self.offset[dim])
            source_offset = _with(source_offset, source_dim, moved)
        run = _run(extent, source_dim, self.steps[dim])
        piece = self._replace_dims(dim, dim + 1, [(offset, extent, *run)])
        return replace(piece, source_offset=source_offset)


def reshape(pieces: Iterable[Piece], old: Sequence[int], new: Sequence[int]) -> list[Piece]:
    """The pieces of a row-major reshape from shape `old` to shape `new`, neither of which is empty."""
    pieces = list(pieces)
    position = 0
    for old_group, new_group in _factor(old, new):
        if old_group != new_group:
            pieces = _regroup(pieces, position, old_group, new_group)
        position += len(new_group)
    return pieces


def in_chunks(piece: Piece, most: int) -> Iterator[Piece]:
    """The piece in parts of at most `most` elements, cut along the slowest dimension of its source."""
    if prod(piece.shape) <= most:
        yield piece
        return
    along = min((dim, k) for k, dim in enumerate(piece.dims) if dim is not None)[1]
    half = piece.shape[along] // 2
    for start, extent in ((0, half), (half, piece.shape[along] - half)):
        offset = _with(piece.offset, along, piece.offset[along] + start)
        yield from in_chunks(piece.cut(Box(offset, _with(piece.shape, along, extent))), most)


def _regroup(pieces: list[Piece], dim: int, old: Sequence[int], new: Sequence[int]) -> list[Piece]:
    if not old:
        for _ in new:
            pieces = [piece.with_dimension(dim) for piece in pieces]
        return pieces
    for extent in old[1:]:
        pieces = [part for piece in pieces for part in piece.merged(dim, extent)]
    if not new:
        return [piece.without_dimension(dim) for piece in pieces]
    for k in range(1, len(new)):
        pieces = [part for piece in pieces for part in piece.divided(dim + k - 1, prod(new[k:]))]
    return pieces


def _factor(old: Sequence[int], new: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Split two shapes with the same number of elements into the shortest runs with equal products."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        left = right = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((tuple(old[i0:i]), tuple(new[j0:j])))
    return groups


def _run(extent: int, dim: int | None, step: int) -> tuple[int | None, int]:
    return (None, 0) if extent == 1 else (dim, step)


def _with(values: tuple, index: int, value: int) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
