"""Which weights a folder holds, whoever wrote it, read from headers and metadata alone.

Three kinds are known: safetensors under a Hugging Face model's names, safetensors of a PEFT adapter, and the DCP folder
(`pytorch_model_fsdp_0`) that Accelerate's FSDP2 writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from expertmesh.checkpoint.dcp import MODEL_FOLDER, SafeReader
from expertmesh.checkpoint.safetensors_format import (
    INDEX_FILE,
    SINGLE_FILE,
    PlannedTensor,
    StoredTensor,
    read_folder,
    read_header,
)
from expertmesh.errors import CheckpointError

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "model."


@dataclass(frozen=True)
class StoredWeights:
    """The weights of one model.

    Attributes:
        form: `model`, `adapter` or `dcp`.
        tensors: name, dtype and shape of each; for `dcp` under the names of the model's modules.
        stored: where they are, by name; empty for `dcp`.
    """

    form: str
    tensors: tuple[PlannedTensor, ...]
    stored: Mapping[str, StoredTensor]


def read_weights(folder: Path) -> StoredWeights:
    """Find the weights of a folder. No tensor is read.

    Raises:
        CheckpointError: there are none, or what describes them is damaged.
    """
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return _of_safetensors("model", read_folder(folder))
    if (folder / MODEL_FOLDER).is_dir():
        metadata = read_dcp(folder / MODEL_FOLDER)
        return StoredWeights("dcp", tuple(_dcp_tensors(metadata)), {})
    if (folder / ADAPTER_FILE).is_file():
        return _of_safetensors("adapter", read_header(folder / ADAPTER_FILE))
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE_FILE}, {INDEX_FILE}, nor {MODEL_FOLDER} is there.")


def read_dcp(folder: Path) -> Metadata:
    """A DCP folder's metadata, after a look at whether all the bytes that it promises are there.

    Raises:
        CheckpointError: it is damaged, or a file is missing or cut.
    """
    metadata = SafeReader(folder).read_metadata()
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, nbytes in sorted(needed.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < nbytes:
            state = "is missing" if size is None else f"has {size} bytes instead of {nbytes}: it is truncated"
            raise CheckpointError(f"{path} {state}. Use another checkpoint.")
    return metadata


def _of_safetensors(form: str, stored: Mapping[str, StoredTensor]) -> StoredWeights:
    return StoredWeights(form, tuple(PlannedTensor(t.name, t.dtype, t.shape) for t in stored.values()), stored)


def _dcp_tensors(metadata: Metadata) -> Iterator[PlannedTensor]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield PlannedTensor(name.removeprefix(_PREFIX), entry.properties.dtype, tuple(entry.size))
