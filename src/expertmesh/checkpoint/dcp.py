"""torch's distributed checkpoint (DCP) folders: written durably, read without running anything they contain.

A DCP folder is `.metadata` (a pickle of plain records: names, shapes, which bytes of which file) and `*.distcp` files.
Loading reshards: every rank reads the parts of its own shards.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from expertmesh.checkpoint.agree import agreed
from expertmesh.errors import CheckpointError

# Accelerate's name for the folder of a sharded model.
MODEL_FOLDER = "pytorch_model_fsdp_0"
_METADATA = ".metadata"
# All that a `.metadata` may refer to. Layouts are stored as a call of a function that looks their name up.
_RECORDS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
}
_LISTED = 5


class SafeReader(dcp.FileSystemReader):
    """A `FileSystemReader` that builds nothing but DCP's own records from `.metadata`, and reads only in its folder.

    Raises:
        CheckpointError: when the metadata is read: it is absent, damaged, asks for anything else, or points elsewhere.
    """

    # Without keyword arguments, so that DCP does not go on to look for a metadata file of each rank.
    def read_metadata(self) -> Metadata:
        path = Path(self.path, _METADATA)
        try:
            with open(path, "rb") as file:
                metadata = _RecordUnpickler(file).load()
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is no complete checkpoint folder: it has no {_METADATA}.") from None
        # Bytes that are no pickle of these records end in almost any exception.
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Resume from another checkpoint.") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} cannot be read: it is not DCP's metadata. Resume from another checkpoint.")
        for info in metadata.storage_data.values():
            if len(PurePosixPath(info.relative_path).parts) != 1 or info.relative_path == "..":
                raise CheckpointError(f"{path} names the file {info.relative_path!r}, which is outside its folder.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata


class SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """Loads a flat state dict in place; what is not a tensor is unpickled with `weights_only=True`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"the entry {name} is not plain data and was not loaded.") from error


class Stage:
    """A state dict on its way into a DCP folder.

    Args:
        state: nested dicts and lists of tensors and plain values.
        copy: copy all tensors to the CPU now, so that training may go on while they are written.
    """

    def __init__(self, state: dict[str, Any], copy: bool) -> None:
        self._state = tree_map_only(Tensor, _copy_to_cpu, state) if copy else state

    def write(self, folder: Path, group: ProcessGroup | None = None) -> None:
        """Write into a folder, which is created; every file is durable afterwards. Collective.

        Args:
            folder: new or empty.
            group: the ranks that write; any backend that carries objects, by default the default group.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        with agreed(f"write {folder}", group), _quiet():
            dcp.save(
                self._state,
                storage_writer=dcp.FileSystemWriter(folder),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )


class ModelStage(Stage):
    """A model's weights on their way into a DCP folder, in the form Accelerate's FSDP2 reads.

    Args:
        model: of any parallelism.
        copy: see `Stage`.
    """

    def __init__(self, model: nn.Module, copy: bool) -> None:
        reshard(model)
        super().__init__({"model": get_model_state_dict(model)}, copy)


def save_dcp_model(model: nn.Module, folder: Path, group: ProcessGroup | None = None) -> None:
    """Write a model's weights into `folder/pytorch_model_fsdp_0`. Collective.

    Raises:
        CheckpointError: see `Stage.write`.
    """
    ModelStage(model, copy=False).write(Path(folder, MODEL_FOLDER), group)


def load_dcp_model(model: nn.Module, folder: Path, group: ProcessGroup | None = None) -> None:
    """Load a model's weights from `folder/pytorch_model_fsdp_0`, whatever mesh wrote them. Collective.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape (by name), or the folder is damaged; the
            same on every rank, and the model is untouched unless the damage is in the tensors' bytes.
    """
    path = Path(folder, MODEL_FOLDER)
    reshard(model)
    state = get_model_state_dict(model)
    wanted = {f"model.{name}": value for name, value in state.items()}
    with agreed(f"load the model from {path}", group):
        _check_names(wanted, SafeReader(path).read_metadata(), path)
    load_flat(wanted, path, group)
    set_model_state_dict(model, {name: wanted[f"model.{name}"] for name in state})


def load_flat(wanted: dict[str, Any], folder: Path, group: ProcessGroup | None = None) -> None:
    """Fill a flat state dict: tensors in place, each rank its own shard; other values are replaced. Collective.

    Raises:
        CheckpointError: an entry is missing or cannot be read; on every rank.
    """
    with agreed(f"load {folder}", group):
        _load(wanted, folder, group, no_dist=not dist.is_initialized())


def load_flat_alone(wanted: dict[str, Any], folder: Path) -> None:
    """What `load_flat` does, for one rank by itself."""
    _load(wanted, folder, None, no_dist=True)


def reshard(model: nn.Module) -> None:
    """Free gathered weights, so that the model's parameters are the optimizer's again.

    After a forward without a backward FSDP2 keeps the last weights gathered, as other Parameter objects.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def few(names: Iterable[str]) -> str:
    """The first names of many, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in _RECORDS.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        # Where the checkpoint was written; Python versions keep the class in different modules.
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of a checkpoint's description")


def _load(wanted: dict[str, Any], folder: Path, group: ProcessGroup | None, no_dist: bool) -> None:
    with _quiet():
        dcp.load(
            wanted,
            storage_reader=SafeReader(folder),
            planner=SafeLoadPlanner(),
            process_group=group,
            no_dist=no_dist,
        )


def _check_names(wanted: Mapping[str, Any], metadata: Metadata, path: Path) -> None:
    stored = metadata.state_dict_metadata
    problems = {
        "missing": wanted.keys() - stored.keys(),
        "not in the model": stored.keys() - wanted.keys(),
        "of another shape": {
            name
            for name in wanted.keys() & stored.keys()
            if isinstance(stored[name], TensorStorageMetadata) and stored[name].size != wanted[name].size()
        },
    }
    lines = [
        f"{kind}: {few(name.removeprefix('model.') for name in names)}" for kind, names in problems.items() if names
    ]
    if lines:
        raise CheckpointError(f"{path} does not fit the model. {'; '.join(lines)}.")


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
