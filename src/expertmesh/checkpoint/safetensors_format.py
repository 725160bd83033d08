"""The safetensors format: where each tensor's bytes lie in a file, to be read or written range by range.

A file is the length of its header (8 bytes, little endian), the header (JSON, padded with spaces) and the tensors'
bytes, row-major, without holes. Nothing here reads or writes a tensor's bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_ALIGNMENT = 8
# The safetensors library refuses longer headers, so a file with one is not worth the memory.
_LONGEST_HEADER = 100_000_000
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        name: its key in the file.
        path: the file.
        dtype: torch's.
        shape: torch's, in elements of `dtype`: two packed 4-bit values are one `float4_e2m1fn_x2`.
        offset: of its first byte, in bytes from the start of the file.
        nbytes: its size in bytes, always that of `shape` and `dtype`.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor that is to be written: its key, dtype, and shape in elements of that dtype."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """One file that is to be written.

    Attributes:
        filename: without a folder.
        header: the file's first bytes, complete.
        tensors: where each tensor's bytes go; `path` is the bare file name.
        nbytes: the file's size, header included.
    """

    filename: str
    header: bytes
    tensors: dict[str, StoredTensor]
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where the tensors of one safetensors file lie, in the order of its header. Reads the header and nothing else.

    Raises:
        CheckpointError: the file is truncated, or no header that accounts for every byte of the file exactly once.
        OSError: it cannot be opened or read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise _damaged(
                path, f"it has {size} bytes, fewer than its header alone needs; it is truncated or no such file"
            )
        if length > _LONGEST_HEADER:
            raise _damaged(path, f"its header claims {length} bytes; the format allows {_LONGEST_HEADER}")
        header = file.read(length)
    entries = _json_object(header, path)
    entries.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    tensors = {name: _parse_entry(name, entry, path, data_start) for name, entry in entries.items()}
    _check_coverage(tensors.values(), path, data_start, size)
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Where all tensors of a Hugging Face model folder lie: one file, or the files that its index names.

    Of a folder with both, the single file counts, as in `from_pretrained`.

    Raises:
        CheckpointError: there is neither; the index names a file outside the folder or a missing one; index and files
            disagree about which tensors there are and where; or a file is damaged (see `read_header`).
        OSError: a file cannot be read.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(_inside(folder, SINGLE_FILE))
    index = folder / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = _json_object(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise _damaged(index, "it has no `weight_map` of tensor names to file names")
    tensors: dict[str, StoredTensor] = {}
    for filename in sorted(set(weight_map.values())):
        stored = read_header(_inside(folder, filename))
        unlisted = [name for name in stored if weight_map.get(name) != filename]
        if unlisted:
            raise _damaged(
                folder / filename, f"it holds tensors that {INDEX_FILE} does not place there: {_some(unlisted)}"
            )
        tensors.update(stored)
    missing = [f"{name} (in {filename})" for name, filename in weight_map.items() if name not in tensors]
    if missing:
        raise _damaged(index, f"it promises tensors that the files do not have: {_some(missing)}")
    return tensors


def plan_files(tensors: Sequence[PlannedTensor], max_shard_size: int, prefix: str = "model") -> list[PlannedFile]:
    """Lay tensors out in files of at most `max_shard_size` bytes of tensors, filled in the given order.

    The split is `save_pretrained`'s: a tensor that is larger than a file may be gets one of its own.

    Raises:
        CheckpointError: a tensor's dtype or shape cannot be stored in this format.
    """
    groups = _split(tensors, max_shard_size)
    return [
        _plan_file(f"{prefix}-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def index_json(files: Iterable[PlannedFile]) -> str:
    """The text of `model.safetensors.index.json` for these files."""
    placed = [(file.filename, tensor) for file in files for tensor in file.tensors.values()]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for _, tensor in placed),
            "total_size": sum(tensor.nbytes for _, tensor in placed),
        },
        "weight_map": {tensor.name: filename for filename, tensor in placed},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _split(tensors: Sequence[PlannedTensor], max_shard_size: int) -> list[list[PlannedTensor]]:
    groups: list[list[PlannedTensor]] = []
    current: list[PlannedTensor] = []
    filled = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes > max_shard_size:
            groups.append([tensor])
            continue
        if filled + nbytes > max_shard_size:
            groups.append(current)
            current, filled = [], 0
        current.append(tensor)
        filled += nbytes
    return [*groups, current] if current else groups


def _plan_file(filename: str, tensors: Sequence[PlannedTensor]) -> PlannedFile:
    # Widest first keeps every tensor aligned to its element size, without which torch cannot view a mapped file.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    ends = list(itertools.accumulate(tensor.nbytes for tensor in ordered))
    ranges = list(zip([0, *ends], ends, strict=False))
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    for tensor, data_range in zip(ordered, ranges, strict=True):
        dtype, shape = _stored_form(tensor)
        entries[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": data_range}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    path = Path(filename)
    placed = {
        tensor.name: StoredTensor(tensor.name, path, tensor.dtype, tensor.shape, len(header) + start, end - start)
        for tensor, (start, end) in zip(ordered, ranges, strict=True)
    }
    return PlannedFile(filename, header, placed, len(header) + sum(end - start for start, end in ranges))


def _stored_form(tensor: PlannedTensor) -> tuple[str, list[int]]:
    """The format's name of the dtype, and the shape in its elements."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or (name == "F4" and not tensor.shape):
        raise CheckpointError(
            f"{tensor.name} ({tensor.dtype}, shape {tensor.shape}) cannot be stored as safetensors; convert it to "
            f"one of {', '.join(sorted(DTYPES))} first"
        )
    return name, [*tensor.shape[:-1], 2 * tensor.shape[-1]] if name == "F4" else list(tensor.shape)


def _parse_entry(name: str, entry: object, path: Path, data_start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(stored_dtype), "shape": list(shape), "data_offsets": [start, end]} if all(
            type(number) is int and number >= 0 for number in (*shape, start, end)
        ):
            pass
        case _:
            raise _damaged(path, f"its header describes {name} by {str(entry)[:200]}")
    dtype = DTYPES.get(stored_dtype)
    if dtype is None:
        raise CheckpointError(
            f"{path} cannot be read: {name} has dtype {stored_dtype}, which torch {torch.__version__} does not have; "
            "convert the file to another dtype"
        )
    if stored_dtype == "F4":
        if not shape or shape[-1] % 2:
            raise _damaged(path, f"{name} has 4-bit rows of shape {shape}, which are no whole bytes")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        raise _damaged(
            path, f"{name} is {stored_dtype} {shape}, {nbytes} bytes, but {end - start} are set aside for it"
        )
    return StoredTensor(name, path, dtype, tuple(shape), data_start + start, nbytes)


def _check_coverage(tensors: Iterable[StoredTensor], path: Path, data_start: int, size: int) -> None:
    """Refuse tensors that do not fill the file after its header exactly."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "comes after bytes of no tensor"
            raise _damaged(path, f"{tensor.name} at byte {tensor.offset} {what}, which ends at byte {position}")
        position += tensor.nbytes
    if position != size:
        raise _damaged(path, f"its tensors end at byte {position}, and the file has {size}: truncated, or not closed")


def _inside(folder: Path, filename: str) -> Path:
    """The path of one of `folder`'s own files. Raises CheckpointError for a name or a link that leads elsewhere."""
    if filename in ("", ".", "..") or any(character in filename for character in "/\\\0"):
        raise CheckpointError(f"{folder / INDEX_FILE} names {filename!r}, which is no file name inside its folder")
    path, home = folder / filename, folder.resolve()
    # The Hub's cache keeps files once, in `blobs`, and links them into `snapshots/<revision>`.
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    target = Path(os.path.realpath(path))
    if target.parent not in (home, *blobs):
        raise CheckpointError(f"{path} is a link to {target}, outside its folder; put the file itself there")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the model in {folder} is incomplete")
    return path


def _json_object(text: bytes, path: Path) -> dict[str, object]:
    try:
        parsed = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its description of the tensors is no JSON ({error})") from error
    if not isinstance(parsed, Mapping):
        raise _damaged(path, "its description of the tensors is no JSON object")
    return parsed


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {reason}. Fetch it again, or use another checkpoint")


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
