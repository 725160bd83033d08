"""Which bytes of which safetensors file a tensor is: files compared with the library's own, damaged ones refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from expertmesh.checkpoint.boxes import Box, contiguous_runs
from expertmesh.checkpoint.safetensors_format import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    PlannedTensor,
    index_json,
    plan_files,
    read_folder,
    read_header,
)
from expertmesh.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
# Files are overwritten or named anew in every example, so one folder a test will do.
one_folder = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs included, as long as the dtype has it."""
    data = random.Random(seed).randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


@st.composite
def state_dicts(draw):
    """Up to 6 tensors of any dtypes and shapes; a packed 4-bit tensor has at least one dimension."""
    tensors = {}
    for name in draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True, max_size=6)):
        dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(SHAPES)
        if dtype == torch.float4_e2m1fn_x2:
            shape = (*shape, 2)
        if name != "__metadata__":
            tensors[name] = random_tensor(dtype, shape, draw(st.integers(0, 99)))
    return tensors


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def planned(tensors: dict[str, torch.Tensor]) -> list[PlannedTensor]:
    return [PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


# Files that are written


@one_folder
@given(tensors=state_dicts(), max_shard_size=st.integers(1, 200), cut=st.data())
def test_files_written_shard_by_shard_are_what_the_library_reads(tmp_path, tensors, max_shard_size, cut):
    files = plan_files(planned(tensors), max_shard_size)
    for file in files:
        path = tmp_path / file.filename
        path.write_bytes(file.header)
        with path.open("r+b") as output:
            output.truncate(file.nbytes)
            for name, stored in file.tensors.items():
                write_in_two_shards(output, stored, tensors[name], cut)
        assert (len(file.header), path.stat().st_size) == (len(file.header) // 8 * 8, file.nbytes)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(stored.offset % stored.dtype.itemsize == 0 for stored in file.tensors.values())
        assert_same(load_file(path), {name: tensors[name] for name in file.tensors})
    if files:
        (tmp_path / INDEX_FILE).write_text(index_json(files))
        found = {name: (stored.dtype, stored.shape) for name, stored in read_folder(tmp_path).items()}
        assert found == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_in_two_shards(output, stored, tensor, data):
    """Cut the tensor along a drawn dimension, as two ranks would hold it, and write each part's runs into place."""
    shape, size = stored.shape, stored.dtype.itemsize
    parts = [Box((0,) * len(shape), shape)]
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        zeros = [0] * len(shape)
        parts = [
            Box(tuple(zeros), (*shape[:dim], at, *shape[dim + 1 :])),
            Box((*zeros[:dim], at, *zeros[dim + 1 :]), (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])),
        ]
    # Bytes as a last dimension, as 4-bit and 8-bit floats cannot be indexed everywhere.
    whole = torch.frombuffer(bytearray(bytes_of(tensor)) or bytearray(1), dtype=torch.uint8)
    whole = whole[: stored.nbytes].reshape(*shape, size)
    for part in parts:
        content, position = bytes_of(whole[part.slices]), 0
        for first, count in contiguous_runs(shape, part):
            output.seek(stored.offset + first * size)
            output.write(content[position : position + count * size])
            position += count * size


@settings(deadline=None)
@given(state_dicts(), st.integers(1, 200))
def test_tensors_are_split_as_save_pretrained_splits_them(tensors, max_shard_size):
    # It takes all empty tensors for one tied weight, as all have the address 0.
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    files = plan_files(planned(tensors), max_shard_size)
    split = split_torch_state_dict_into_shards(
        tensors, max_shard_size=max_shard_size, filename_pattern="model{suffix}.safetensors"
    )
    assert [set(file.tensors) for file in files] == [set(names) for names in split.filename_to_tensors.values()]
    assert json.loads(index_json(files))["metadata"]["total_size"] == split.metadata["total_size"]
    if split.is_sharded:
        assert [file.filename for file in files] == list(split.filename_to_tensors)
        assert json.loads(index_json(files))["weight_map"] == split.tensor_to_filename


def test_one_file_has_the_sharded_name_and_an_index_of_whole_numbers():
    (file,) = plan_files([PlannedTensor("b", torch.bfloat16, (2, 3)), PlannedTensor("a", torch.int64, ())], 5 << 30)
    assert file.filename == "model-00001-of-00001.safetensors"
    assert json.loads(index_json([file])) == {
        "metadata": {"total_parameters": 7, "total_size": 20},
        "weight_map": {"a": file.filename, "b": file.filename},
    }


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_what_the_format_cannot_hold_is_refused_by_name(dtype):
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        plan_files([PlannedTensor("layer.weight", dtype, ())], 100)


# Files that are read


@one_folder
@given(tensors=state_dicts())
def test_the_librarys_files_are_read(tmp_path, tensors):
    path = tmp_path / SINGLE_FILE
    save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()
    stored = read_folder(tmp_path)
    assert stored == read_header(path) and stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (stored[name].name, stored[name].path, stored[name].nbytes) == (name, path, tensor.nbytes)
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert content[stored[name].offset :][: stored[name].nbytes] == bytes_of(tensor)


SAMPLE = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.uint8), "c": torch.tensor(1)}
SAMPLE_FILE = save(SAMPLE, {"format": "pt"})
HEADER_END = 8 + int.from_bytes(SAMPLE_FILE[:8], "little")


@one_folder
@given(length=st.integers(0, len(SAMPLE_FILE) - 1))
def test_a_truncated_file_is_refused_by_name(tmp_path, length):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(SAMPLE_FILE[:length])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_header(path)


@one_folder
@given(
    edits=st.lists(
        st.tuples(st.integers(0, HEADER_END - 1), st.sampled_from(b'0123456789{}[]":,abFU. -\x00\xff\\')),
        min_size=1,
        max_size=3,
    )
)
def test_a_damaged_header_is_refused_whenever_the_library_refuses_it(tmp_path, edits):
    path = tmp_path / "damaged.safetensors"
    content = bytearray(SAMPLE_FILE)
    for position, byte in edits:
        content[position] = byte
    path.write_bytes(content)
    try:
        with safe_open(path, "pt") as opened:
            expected = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError:
        with pytest.raises(CheckpointError, match=r"damaged\.safetensors"):
            read_header(path)
    else:
        assert {name: stored.shape for name, stored in read_header(path).items()} == expected


def entry(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry(), "b": entry(offsets=(1, 3))}, "b at byte .* overlaps"),
        ({"a": entry(), "b": entry(offsets=(3, 5))}, "b at byte .* no tensor"),
        ({"a": entry(offsets=(1, 3))}, "a at byte .* no tensor"),
        ({"a": entry(shape=(9,), offsets=(0, 9))}, "the file has"),
        ({"a": entry(shape=(1,), offsets=(0, 1))}, "the file has"),
        ({"a": entry(shape=(3,))}, "3 bytes, but 2"),
        ({"a": entry(shape=(-2,), offsets=(2, 0))}, "describes a"),
        ({"a": entry(shape=(True, 2))}, "describes a"),
        ({"a": entry(shape=(2.0,))}, "describes a"),
        ({"a": entry(offsets=(0, 2, 3))}, "describes a"),
        ({"a": 3}, "describes a"),
        ({"a": entry(dtype="F6_E2M3")}, "F6_E2M3"),
        ({"a": entry(dtype="F4", shape=(3,))}, "4-bit"),
        ([1], "no JSON object"),
        ("[" * 100_000, "no JSON"),
        ("\xff", "no JSON"),
        ("9" * 5000, "no JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, reason):
    text = header.encode("latin-1") if isinstance(header, str) else json.dumps(header).encode()
    path = tmp_path / "lies.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(2 if "b" not in str(header) else 5))
    with pytest.raises(CheckpointError, match=rf"lies\.safetensors.*{reason}"):
        read_header(path)


def test_a_header_longer_than_the_format_allows_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match="allows"):
        read_header(path)


# Folders


def write_folder(folder: Path, *, weight_map: dict | None = None) -> Path:
    """SAMPLE in two files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"1.safetensors": ["a"], "2.safetensors": ["b", "c"]}
    for filename, names in files.items():
        save_file({name: SAMPLE[name] for name in names}, folder / filename)
    truth = {name: filename for filename, names in files.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map or truth}))
    return folder


def test_an_indexed_folder_is_read(tmp_path):
    stored = read_folder(write_folder(tmp_path))
    assert {name: tensor.path.name for name, tensor in stored.items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
        "c": "2.safetensors",
    }


def test_a_single_file_counts_before_an_index_as_in_from_pretrained(tmp_path):
    save_file({"only": torch.zeros(1)}, write_folder(tmp_path) / SINGLE_FILE)
    assert set(read_folder(tmp_path)) == {"only"}


@pytest.mark.parametrize(
    "name", ["../1.safetensors", "/etc/passwd", "sub/1.safetensors", "..", ".", "", "..\\1.safetensors", "a\0b"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = write_folder(tmp_path / "model", weight_map={"a": name, "b": "2.safetensors", "c": "2.safetensors"})
    save_file({"a": SAMPLE["a"]}, tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError, match="no file name inside its folder"):
        read_folder(folder)


@pytest.mark.parametrize("filename", ["1.safetensors", SINGLE_FILE])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path, filename):
    folder = write_folder(tmp_path / "model")
    save_file({"a": SAMPLE["a"]}, tmp_path / "secret")
    (folder / filename).unlink(missing_ok=True)
    (folder / filename).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="secret, outside its folder"):
        read_folder(folder)


def test_a_link_to_itself_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "1.safetensors").unlink()
    (folder / "1.safetensors").symlink_to("1.safetensors")
    with pytest.raises(CheckpointError, match=r"1\.safetensors"):
        read_folder(folder)


def test_a_hub_cache_snapshot_is_read_and_so_is_a_link_to_the_folder(tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot = write_folder(cache / "snapshots" / "0a1b")
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert set(read_folder(snapshot)) == set(SAMPLE)
    (tmp_path / "model").symlink_to(snapshot)
    assert set(read_folder(tmp_path / "model")) == set(SAMPLE)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors"}, r"2\.safetensors.*does not place there: c"),
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}, r"does not place there: b"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors", "d": "1.safetensors"}, r"d \(in 1\.safe"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors", "d": "3.safetensors"}, r"3.* is missing"),
        ({"a": 1}, "weight_map"),
        ([1], "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused_by_name(tmp_path, weight_map, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_folder(write_folder(tmp_path, weight_map=weight_map))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        read_folder(tmp_path)
