"""A model's stored tensors with adapters merged into them, one after the other; the model is never held whole.

Where an adapted parameter's elements are stored is not known by name: Transformers' own conversion is followed
(`trace_load`), so that each stored tensor knows which boxes of which parameters it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.checkpoint.boxes import Box
from expertmesh.checkpoint.conversion import trace_load
from expertmesh.checkpoint.file_io import CHUNK
from expertmesh.checkpoint.pieces import Piece
from expertmesh.checkpoint.safetensors_format import PlannedTensor, StoredTensor
from expertmesh.checkpoint.tensor_streams import TensorStream
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError, some


class Adaptation(Protocol):
    """What adapters change of a model.

    Attributes:
        shapes: of each changed parameter, by the base model's name for it.
        indivisible: those of which only the whole can be changed.
    """

    shapes: Mapping[str, tuple[int, ...]]
    indivisible: Collection[str]

    def merge(self, name: str, box: Box, weight: Tensor) -> Tensor:
        """A parameter's elements in `box` with the adapters merged.

        Args:
            name: of the parameter.
            box: which part of it this is; all of an indivisible one.
            weight: its elements before, of shape `box.shape`; may be written into.

        Returns:
            Of the same shape and dtype.
        """


class MergedStream:
    """A base model's stored tensors with adapters merged. See `TensorStream`.

    Holds one stored matrix, or one matrix of a stored stack of them, and what merging it takes: not a whole stack.

    Args:
        base: the base model's tensors.
        stored: where they are.
        model: the base model without weights, as it is without adapters or with them around its modules.
        adaptation: what to merge.

    Raises:
        CheckpointError: by name: an adapted parameter that is not stored, is stored in another shape or in a way that
            nothing can be merged into.
    """

    def __init__(
        self,
        base: TensorStream,
        stored: Mapping[str, StoredTensor],
        model: PreTrainedModel,
        adaptation: Adaptation,
    ) -> None:
        self._base = base
        self._adaptation = adaptation
        self.tensors: Sequence[PlannedTensor] = base.tensors
        self._planned = {tensor.name: tensor for tensor in base.tensors}
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        plan = trace_load(model, stored)
        misshapen = {name for name, _, _ in plan.misshapen}
        misshapen |= {name for name, tensor in plan.tensors.items() if not _is_complete(tensor)}
        misshapen |= set(plan.unconvertible)
        _refuse("not stored with the model's shape", adaptation.shapes.keys() & misshapen)
        _refuse("not in its files", adaptation.shapes.keys() - plan.tensors.keys())
        _refuse(
            "computed from what is stored and not stored itself",
            {name for name in adaptation.shapes if plan.tensors[name].opaque},
        )
        _refuse(
            "stored in several parts, and their adapter needs the whole",
            {name for name in adaptation.indivisible if len(plan.tensors[name].pieces) > 1},
        )
        for name in adaptation.shapes:
            self._note(name, plan.tensors[name])

    def parts(self, name: str) -> Iterator[Tensor]:
        """See `TensorStream`."""
        if name not in self._pieces:
            yield from self._base.parts(name)
            return
        planned = self._planned[name]
        # A matrix is merged at once; of a stack of matrices one at a time.
        slabs = planned.shape[0] if len(planned.shape) > 2 and self._divides(name) else 1
        shape = (planned.shape[0] // slabs, *planned.shape[1:])
        for position, slab in enumerate(_gathered(self._base.parts(name), prod(shape), planned.dtype)):
            box = Box((position * shape[0], *(0 for _ in shape[1:])), shape)
            merged = self._merged(name, box, slab.view(shape))
            yield from merged.flatten().split(max(1, CHUNK // merged.dtype.itemsize))

    def _note(self, name: str, traced: TracedTensor) -> None:
        for piece in traced.pieces:
            self._pieces.setdefault(piece.source, []).append((name, piece))

    def _divides(self, name: str) -> bool:
        return not any(parameter in self._adaptation.indivisible for parameter, _ in self._pieces[name])

    def _merged(self, name: str, box: Box, slab: Tensor) -> Tensor:
        """A box of a stored tensor with what is in it merged, in place."""
        for parameter, whole in self._pieces[name]:
            piece = whole.cut_in_source(box)
            if piece is None:
                continue
            origin = Box(piece.source_offset, (1,) * len(box.shape)).within(box).offset
            strides = slab.stride()
            first = sum(at * stride for at, stride in zip(origin, strides, strict=True))
            region = slab.as_strided(piece.shape, piece.strides_in(strides), first)
            region.copy_(self._adaptation.merge(parameter, piece.box, region.contiguous().clone()))
        return slab


def _gathered(parts: Iterable[Tensor], numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Flat parts of any size as flat tensors of `numel` elements, each valid until the next."""
    buffer, filled = torch.empty(numel, dtype=dtype), 0
    for part in parts:
        while part.numel():
            taken = min(part.numel(), numel - filled)
            buffer[filled : filled + taken] = part[:taken]
            filled, part = filled + taken, part[taken:]
            if filled == numel:
                yield buffer
                filled = 0


def _is_complete(tensor: TracedTensor) -> bool:
    """Whether what a tensor is put together of covers it: a stack of unequal matrices is none."""
    return tensor.opaque or sum(prod(piece.shape) for piece in tensor.pieces) == tensor.numel()


def _refuse(reason: str, names: Collection[str]) -> None:
    if names:
        raise CheckpointError(
            f"the adapter cannot be merged into the base model, of which these are {reason}: {some(sorted(names))}. "
            f"Give the base model that the adapter was trained on with --base."
        )
