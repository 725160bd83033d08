"""Tensors that autograd shall not keep, because what they are made of is kept anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class _View:
    """Where a part of the tensor lies in it."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Remaking:
    """Keeps what lies in one tensor as its place there, and has the tensor itself from the first use to the last.

    Args:
        tensor: what is not kept.
        make: what makes it once more.
    """

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._make = make
        self._num_kept = 0
        self._whole: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | _View:
        if StorageWeakRef(saved.untyped_storage()) != self._storage:
            return saved
        self._num_kept += 1
        return _View(saved.size(), saved.stride(), saved.storage_offset())

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._make()
        whole = self._whole
        self._num_kept -= 1
        if self._num_kept == 0:
            self._whole = None
        return whole.as_strided(kept.size, kept.stride, kept.offset)


@contextmanager
def remade(tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """While the block runs, autograd keeps nothing of a tensor, and makes it anew in the one backward that follows.

    Where somebody else already decides what is kept, as activation checkpointing does, that stands.

    Args:
        tensor: contiguous, with a storage of its own.
        make: makes the same values. What it refers to is kept.
    """
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        yield
        return
    remaking = _Remaking(tensor, make)
    with saved_tensors_hooks(remaking.pack, remaking.unpack):
        yield
