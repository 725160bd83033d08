"""Reading what a mask of Transformers means: who sees whom, from the function that says it element by element.

`transformers.masking_utils` composes masks of closures. Those that Transformer Engine's kernels have are recognised by
their code and read from their cells; of any other nothing is guessed. Checked on transformers 5.24.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import masking_utils as hf


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees.

    Attributes:
        is_causal: none behind itself.
        window: how many to its left and to its right, -1 for all; of a causal one, 0 to its right.
        sequence_ids: `[batch, length]`, equal for those that see each other, in sequences that follow each other; None
            where a row is one sequence.
        has_own_positions: positions are counted from each sequence's start. Differences between them, which is all that
            the others look at, are the same.
    """

    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sequence_ids: Tensor | None = None
    has_own_positions: bool = False

    def within(self, other: Pattern) -> Pattern | None:
        """What both let be seen; None where that is not read."""
        if self.sequence_ids is not None and other.sequence_ids is not None:
            return None
        first, second = self.window, other.window
        return Pattern(
            self.is_causal or other.is_causal,
            (_narrower(first[0], second[0]), _narrower(first[1], second[1])),
            other.sequence_ids if self.sequence_ids is None else self.sequence_ids,
            self.has_own_positions or other.has_own_positions,
        )


def read(function: Callable[..., Tensor]) -> Pattern | None:
    """The pattern of a mask function; None where it is not one of those that are known."""
    pattern = _read(function)
    # Positions that start anew are the same as ours only between those that see each other.
    if pattern is None or (pattern.has_own_positions and pattern.sequence_ids is None):
        return None
    return pattern


def _read(function: Callable[..., Tensor]) -> Pattern | None:
    read_cells = _READERS.get(getattr(function, "__code__", None))
    return None if read_cells is None else read_cells(**inspect.getclosurevars(function).nonlocals)


def _all_of(mask_functions: tuple[Callable[..., Tensor], ...], **_: object) -> Pattern | None:
    found: Pattern | None = Pattern()
    for function in mask_functions:
        other = _read(function)
        if found is None or other is None:
            return None
        found = found.within(other)
    return found


def _remapped(mask_function: Callable[..., Tensor], **_: object) -> Pattern | None:
    inner = _read(mask_function)
    return None if inner is None else Pattern(inner.is_causal, inner.window, inner.sequence_ids, True)


def _narrower(first: int, second: int) -> int:
    return max(first, second) if min(first, second) < 0 else min(first, second)


_READERS: dict[object, Callable[..., Pattern | None]] = {
    hf.causal_mask_function.__code__: lambda **_: Pattern(is_causal=True, window=(-1, 0)),
    hf.bidirectional_mask_function.__code__: lambda **_: Pattern(),
    hf.and_masks().__code__: _all_of,
    hf.sliding_window_overlay(1).__code__: lambda sliding_window, **_: Pattern(window=(sliding_window - 1, -1)),
    hf.sliding_window_bidirectional_overlay(1).__code__: lambda sliding_window, **_: Pattern(
        window=(sliding_window, sliding_window)
    ),
    hf.packed_sequence_mask_function(torch.empty(0)).__code__: lambda packed_sequence_mask, **_: Pattern(
        sequence_ids=packed_sequence_mask
    ),
    hf.remap_positions_for_packed_sequence(hf.causal_mask_function, torch.empty(0)).__code__: _remapped,
}
