"""Following a weight conversion without moving one element: tensors that know where their elements come from.

Transformers converts weights between the names and layouts of a checkpoint and those of its modules with ordinary
tensor operations. Run on `TracedTensor`s, the very same code tells which bytes of a file belong to which elements of a
parameter, and the other way round, for whole tensors, whatever the sharding. An operation that computes anything
instead of moving elements gives an `opaque` tensor, which only remembers which sources it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from expertmesh.checkpoint.pieces import Piece, reshape

# A conversion that shreds a tensor finer than this is quicker on whole tensors.
_MOST_PIECES = 1 << 16


class TracedTensor(Tensor):
    """A tensor without elements.

    Attributes:
        pieces: where its elements come from; they cover it without overlap. None if it is opaque.
        sources: names of the tensors that its elements come from, or are computed from.
    """

    pieces: tuple[Piece, ...] | None
    sources: frozenset[str]

    @staticmethod
    def __new__(
        cls: type[TracedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Iterable[Piece] | None,
        sources: Iterable[str] | None = None,
    ) -> TracedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="cpu")
        tensor.pieces = None if pieces is None else tuple(pieces)
        if tensor.pieces is not None and len(tensor.pieces) > _MOST_PIECES:
            sources, tensor.pieces = {piece.source for piece in tensor.pieces}, None
        if tensor.pieces is not None:
            sources = {piece.source for piece in tensor.pieces}
        tensor.sources = frozenset(sources or ())
        return tensor

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
        """The source tensor `name` itself."""
        return cls(shape, dtype, [Piece.whole(name, shape)] if 0 not in shape else [])

    @property
    def opaque(self) -> bool:
        """Whether its elements are not simply those of its sources, so that the conversion has to be run for real."""
        return self.pieces is None or not all(piece.invertible for piece in self.pieces)

    def __repr__(self) -> str:
        return f"TracedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, sources={sorted(self.sources)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> TracedTensor | list[TracedTensor]:
        kwargs = kwargs or {}
        traced = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, TracedTensor)]
        follow = _FOLLOWED.get(func.overloadpacket)
        if follow is not None and all(tensor.pieces is not None and tensor.numel() for tensor in traced):
            return follow(*args, **kwargs)
        return _opaque(func, args, kwargs, traced)


def _opaque(func: Any, args: tuple, kwargs: dict[str, Any], traced: list[TracedTensor]) -> Any:
    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(TracedTensor, on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    sources = frozenset().union(*(tensor.sources for tensor in traced))
    result = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda tensor: TracedTensor(tensor.shape, tensor.dtype, None, sources), result)


def _same(tensor: TracedTensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> TracedTensor:
    return TracedTensor(tensor.shape, dtype or tensor.dtype, tensor.pieces)


def _view(tensor: TracedTensor, shape: Sequence[int], *_: Any) -> TracedTensor:
    shape = list(shape)
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape[shape.index(-1)] = tensor.numel() // known
    return TracedTensor(shape, tensor.dtype, reshape(tensor.pieces, tuple(tensor.shape), shape))


def _permute(tensor: TracedTensor, order: Sequence[int]) -> TracedTensor:
    order = [dim % tensor.ndim for dim in order]
    shape = [tensor.shape[dim] for dim in order]
    return TracedTensor(shape, tensor.dtype, [piece.permuted(order) for piece in tensor.pieces])


def _transpose(tensor: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _t(tensor: TracedTensor) -> TracedTensor:
    return _transpose(tensor, 0, 1) if tensor.ndim == 2 else _same(tensor)


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return TracedTensor(shape, tensor.dtype, [piece.with_dimension(dim) for piece in tensor.pieces])


def _squeeze(tensor: TracedTensor, dim: int | None = None) -> TracedTensor:
    if dim is not None and tensor.shape[dim] != 1:
        return _same(tensor)
    shape = list(tensor.shape)
    if dim is None:
        shape = [extent for extent in shape if extent != 1]
    else:
        del shape[dim]
    return _view(tensor, shape)


def _slice(
    tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TracedTensor:
    dim %= tensor.ndim
    start, end, step = slice(start, end, step).indices(tensor.shape[dim])
    shape = list(tensor.shape)
    shape[dim] = len(range(start, end, step))
    pieces = (piece.strided(dim, start, end, step) for piece in tensor.pieces)
    return TracedTensor(shape, tensor.dtype, [piece for piece in pieces if piece is not None])


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:
    dim %= tensor.ndim
    index %= tensor.shape[dim]
    row = _slice(tensor, dim, index, index + 1)
    shape = (*row.shape[:dim], *row.shape[dim + 1 :])
    return TracedTensor(shape, row.dtype, [piece.without_dimension(dim) for piece in row.pieces])


def _split_with_sizes(tensor: TracedTensor, sizes: Sequence[int], dim: int = 0) -> list[TracedTensor]:
    stops = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [_slice(tensor, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _split(tensor: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:
    extent = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, extent - start) for start in range(0, extent, size)], dim)


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= tensors[0].ndim
    pieces, extent = [], 0
    across = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(across) > 1:
        raise RuntimeError(f"tensors to be joined on dimension {dim} have other shapes across it: {sorted(across)}")
    for tensor in tensors:
        pieces.extend(piece.moved(dim, extent) for piece in tensor.pieces)
        extent += tensor.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = extent
    return TracedTensor(shape, tensors[0].dtype, pieces)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise RuntimeError(f"tensors to be stacked have different shapes: {sorted(shapes)}")
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


aten = torch.ops.aten
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    aten.alias: _same,
    aten.detach: _same,
    aten.clone: _same,
    aten.contiguous: _same,
    aten.lift_fresh: _same,
    aten._to_copy: _same,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.slice: _slice,
    aten.select: _select,
    aten.split: _split,
    aten.split_with_sizes: _split_with_sizes,
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
}
