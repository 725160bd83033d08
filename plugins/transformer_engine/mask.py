"""What a model's attention masks are made to be: who sees whom, as Transformer Engine is told it.

Made once a forward, and handed to every layer in the place of a tensor. Where sequences differ in length, by padding or
because several were packed into a row, their tokens are put one behind the other (`thd`): padding, on whichever side,
takes part in nothing, and its outputs are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from expertmesh_plugins.transformer_engine.pattern import Pattern, read
from torch import Tensor
from transformers.masking_utils import causal_mask_function
from transformers.utils.import_utils import is_tracing


@dataclass(frozen=True)
class Sequences:
    """Sequences of any lengths in one batch.

    Attributes:
        bounds: `[sequences + 1]` int32, where each begins among the tokens that take part.
        longest: of the lengths.
        tokens: `[tokens]` int64, which of the `batch * length` take part; None where all do.
    """

    bounds: Tensor
    longest: int
    tokens: Tensor | None

    @classmethod
    def padded(cls, takes_part: Tensor) -> Sequences:
        """From `[batch, length]` bool. Waits for the device."""
        lengths = takes_part.sum(1)
        return cls._of(lengths, takes_part.flatten().nonzero().squeeze(1))

    @classmethod
    def packed(cls, sequence_ids: Tensor) -> Sequences:
        """From `[batch, length]`, equal within a sequence. Waits for the device."""
        begins = torch.ones_like(sequence_ids, dtype=torch.bool)
        begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        starts = begins.flatten().nonzero().squeeze(1)
        ends = torch.cat([starts[1:], starts.new_tensor([sequence_ids.numel()])])
        return cls._of(ends - starts, None)

    @classmethod
    def _of(cls, lengths: Tensor, tokens: Tensor | None) -> Sequences:
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(bounds, int(lengths.max()), tokens)


@dataclass(frozen=True)
class Mask:
    """Who sees whom in one forward.

    Attributes:
        pattern: within a sequence.
        sequences: None where every row is one, of full length.
        make: makes the mask that Transformers would have had.
    """

    pattern: Pattern
    sequences: Sequences | None
    make: Callable[[], Tensor | None] = field(repr=False)

    @cached_property
    def tensor(self) -> Tensor | None:
        """The mask as the model's former attention takes it."""
        return self.make()


def make_mask(original: Callable[..., Tensor | None], **request: Any) -> Mask | Tensor | None:
    """Answer a request of Transformers' mask interface.

    Args:
        original: answers it for the attention that the model had.
        request: see `transformers.masking_utils.sdpa_mask`.

    Returns:
        A `Mask`; what `original` answers where Transformer Engine's kernels have no such mask, where keys are those of
        a cache, and while a compiler looks on, who cannot be told lengths.
    """

    def make() -> Tensor | None:
        return original(**request)

    padding = request.get("attention_mask")
    pattern = None if request.get("use_vmap") else read(request.get("mask_function", causal_mask_function))
    if pattern is None or not _is_square(request) or (padding is not None and is_tracing(padding)):
        return make()
    if pattern.sequence_ids is not None:
        return make() if padding is not None else Mask(pattern, Sequences.packed(pattern.sequence_ids), make)
    if padding is None or bool(padding.all()):
        return Mask(pattern, None, make)
    return Mask(pattern, Sequences.padded(padding.bool()), make)


def _is_square(request: dict[str, Any]) -> bool:
    """Whether keys are those of the queries, and no others from a cache."""
    offsets = request.get("q_offset", 0), request.get("kv_offset", 0)
    if any(isinstance(offset, Tensor) or offset for offset in offsets):
        return False
    padding = request.get("attention_mask")
    fits = padding is None or padding.shape[-1] == request["kv_length"]
    return fits and request["q_length"] == request["kv_length"]
