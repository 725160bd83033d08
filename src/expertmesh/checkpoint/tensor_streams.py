"""A folder's weights tensor by tensor and each in parts, so that any model passes through a few MB of memory.

Weights in safetensors are read as they are, and their checksums compared. Those that Accelerate's FSDP2 wrote (DCP)
have the modules' names and layout; they go through Transformers' own conversion to those of a published model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.checkpoint.conversion import revert
from expertmesh.checkpoint.dcp import MODEL_FOLDER, load_flat_alone
from expertmesh.checkpoint.file_io import CHUNK, InputFiles, bytes_of
from expertmesh.checkpoint.safetensors_format import PlannedTensor, StoredTensor
from expertmesh.checkpoint.shards import tensors_to_save
from expertmesh.checkpoint.trace import TracedTensor
from expertmesh.errors import CheckpointError, some


class TensorStream(Protocol):
    """Weights to be read one after the other."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]:
        """All of them, in the order that is cheapest to read."""

    def parts(self, name: str) -> Iterator[Tensor]:
        """One tensor's elements, row-major, in flat parts of at most `CHUNK` bytes, each valid until the next."""


class SafetensorsStream:
    """The tensors of safetensors files.

    Args:
        stored: where they are.
        checksums: CRC-32 by name, as 8 hexadecimal digits, where one was noted.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], checksums: Mapping[str, str]) -> None:
        self._stored = stored
        self._checksums = checksums
        self.tensors = [PlannedTensor(t.name, t.dtype, t.shape) for t in stored.values()]

    def parts(self, name: str) -> Iterator[Tensor]:
        """See `TensorStream`.

        Raises:
            CheckpointError: after the last part: these are not the bytes that were written.
        """
        stored, crc = self._stored[name], 0
        buffer = torch.empty(min(CHUNK, stored.nbytes), dtype=torch.uint8)
        with InputFiles() as files:
            for start in range(0, stored.nbytes, CHUNK):
                part = buffer[: min(CHUNK, stored.nbytes - start)]
                files.read(stored, start, bytes_of(part))
                crc = zlib.crc32(part.numpy(), crc)
                yield part.view(stored.dtype)
        if f"{crc:08x}" != self._checksums.get(name, f"{crc:08x}"):
            raise CheckpointError(
                f"{stored.path} was damaged since it was written: the checksum of {name} differs. Use another "
                f"checkpoint."
            )


class DcpStream:
    """The tensors that a model in a DCP folder has as a published model.

    Holds the tensors of the model that one stored tensor is made of: at most one layer's experts, at most twice.

    Args:
        folder: has `pytorch_model_fsdp_0`.
        found: what that holds.
        model: the same model without weights.

    Raises:
        CheckpointError: these are not the model's tensors.
    """

    def __init__(self, folder: Path, found: Sequence[PlannedTensor], model: PreTrainedModel) -> None:
        self._folder = folder / MODEL_FOLDER
        self._model = model
        self._own = {tensor.name: tensor for tensor in found}
        self._refuse_other_tensors()
        wanted = [self._own[name] for name in tensors_to_save(model)]
        self._traced = revert(model, {t.name: TracedTensor.of(t.name, t.shape, t.dtype) for t in wanted})
        order = {name: position for position, name in enumerate(self._own)}
        self.tensors = [
            PlannedTensor(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in sorted(self._traced.items(), key=lambda item: min(order[s] for s in item[1].sources))
        ]
        self._held: dict[str, Tensor] = {}

    def parts(self, name: str) -> Iterator[Tensor]:
        """See `TensorStream`."""
        whole = self._whole(name).flatten()
        yield from whole.split(max(1, CHUNK // whole.dtype.itemsize))

    def _refuse_other_tensors(self) -> None:
        needed = tensors_to_save(self._model)
        wrong = {
            "missing": needed.keys() - self._own.keys(),
            "not in the model": self._own.keys() - self._model.state_dict().keys(),
            "of another shape": {
                name for name in needed.keys() & self._own.keys() if tuple(needed[name].shape) != self._own[name].shape
            },
        }
        lines = [f"{kind}: {some(sorted(names))}" for kind, names in wrong.items() if names]
        if lines:
            raise CheckpointError(
                f"the weights in {self._folder} are not those of {type(self._model).__name__} with this "
                f"configuration; {'; '.join(lines)}. Give the configuration that the model was trained with."
            )

    def _whole(self, name: str) -> Tensor:
        traced = self._traced[name]
        sources = self._load(traced.sources)
        if traced.opaque:
            return revert(self._model, dict(sources))[name].contiguous()
        whole = torch.empty(traced.shape, dtype=traced.dtype)
        for piece in traced.pieces:
            source = sources[piece.source]
            strides = source.stride()
            first = sum(at * stride for at, stride in zip(piece.source_offset, strides, strict=True))
            whole[piece.box.slices] = source.as_strided(piece.shape, piece.strides_in(strides), first)
        return whole

    def _load(self, names: frozenset[str]) -> dict[str, Tensor]:
        held = {name: self._held[name] for name in names & self._held.keys()}
        self._held = {}
        missing = {
            name: torch.empty(self._own[name].shape, dtype=self._own[name].dtype) for name in names - held.keys()
        }
        if missing:
            load_flat_alone({f"model.{name}": tensor for name, tensor in missing.items()}, self._folder)
        self._held = held | missing
        return self._held
