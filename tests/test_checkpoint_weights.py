"""Weights go straight from shards into the files that `save_pretrained` would write, and back, for any sharding.

No processes here: the ranks of a sharding are played one after the other, each with its own boxes of every tensor.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from ranks.families import BUILDERS, build_family
from ranks.models import FAMILIES
from safetensors.torch import load_file, save_file

from expertmesh.checkpoint.boxes import Box
from expertmesh.checkpoint.checksum import combine_runs
from expertmesh.checkpoint.conversion import trace_load
from expertmesh.checkpoint.file_io import create_file
from expertmesh.checkpoint.reader import check_fingerprints, read_shards
from expertmesh.checkpoint.safetensors_format import read_folder
from expertmesh.checkpoint.shards import LocalShard, named_tensors
from expertmesh.checkpoint.writer import Weights, write_parts
from expertmesh.errors import CheckpointError


def boxes(shape: tuple[int, ...], parts: int, chooser: random.Random) -> list[Box]:
    """Cut a tensor into boxes as meshes do: along one dimension, or along two."""
    cut = [Box((0,) * len(shape), shape)]
    for dim in chooser.sample(range(len(shape)), k=min(len(shape), chooser.choice([0, 1, 1, 2]))):
        cut = [piece for box in cut for piece in split(box, dim, parts)]
    return [box for box in cut if box.numel]


def split(box: Box, dim: int, parts: int) -> list[Box]:
    size = -(-box.shape[dim] // parts)
    pieces = []
    for start in range(0, box.shape[dim], size):
        extent = min(size, box.shape[dim] - start)
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        pieces.append(Box(offset, (*box.shape[:dim], extent, *box.shape[dim + 1 :])))
    return pieces


def sharded(tensors: dict[str, torch.Tensor], num_ranks: int, seed: int) -> list[dict[str, LocalShard]]:
    """Every tensor's boxes, dealt out; each rank has one box of a tensor at most."""
    chooser = random.Random(seed)
    ranks: list[dict[str, LocalShard]] = [{} for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        cut = boxes(tuple(tensor.shape), chooser.choice([1, 2, 3]), chooser)
        while len(cut) > num_ranks:
            cut = boxes(tuple(tensor.shape), 1, chooser)
        for rank, box in zip(chooser.sample(range(num_ranks), len(cut)), cut, strict=True):
            part = tensor.detach()[box.slices].clone()
            ranks[rank][name] = LocalShard(tuple(tensor.shape), box, part, True)
    return ranks


def write_as_ranks(weights: Weights, ranks: list[dict[str, LocalShard]], folder, max_shard_size: int):
    folder.mkdir()
    files = weights.plan(max_shard_size)
    for file in files:
        create_file(folder / file.filename, file.header, file.nbytes)
    runs = []
    for rank, shards in enumerate(ranks):
        converted = weights.converted if rank == 0 else {}
        runs += write_parts(Weights(weights.tensors, shards, converted), files, folder)
    return files, runs


@pytest.mark.parametrize(
    ("family", "num_ranks"), [*((name, 9) for name in BUILDERS), *product(FAMILIES, [1, 4])], ids=str
)
def test_any_sharding_writes_the_files_of_one_process_and_reads_them_back(family, num_ranks, tmp_path):
    model = build_family(family)
    model.save_pretrained(tmp_path / "stock")
    stock = load_file(tmp_path / "stock" / "model.safetensors")
    weights = Weights.of(model)
    ranks = sharded(named_tensors(model), num_ranks, seed=num_ranks)
    files, runs = write_as_ranks(weights, ranks, tmp_path / "ours", max_shard_size=40_000)
    ours = {}
    for file in files:
        ours.update(load_file(tmp_path / "ours" / file.filename))
        for tensor in file.tensors.values():
            crc = combine_runs([run for run in runs if run.tensor == tensor.name], tensor.nbytes)
            assert crc is not None, f"{tensor.name} has holes or overlaps"
    assert ours.keys() == stock.keys()
    for name, tensor in stock.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name

    plan = trace_load(model, read_folder(tmp_path / "stock"))
    plan.refuse_other_tensors(tmp_path)
    expected = [{name: shard.tensor.clone() for name, shard in shards.items()} for shards in ranks]
    for shards, truth in zip(ranks, expected, strict=True):
        for shard in shards.values():
            shard.tensor.fill_(True if shard.tensor.dtype == torch.bool else 77)
        reading = read_shards(plan, shards)
        check_fingerprints(reading.fingerprints, shards)
        for name, shard in shards.items():
            assert torch.equal(shard.tensor, truth[name]), name


def test_a_parameter_that_lost_its_weights_after_the_read_is_named(tmp_path):
    model = build_family("qwen3_moe")
    model.save_pretrained(tmp_path)
    plan = trace_load(model, read_folder(tmp_path))
    (shards,) = sharded(named_tensors(model), 1, seed=0)
    reading = read_shards(plan, shards)
    shards["model.layers.1.mlp.experts.down_proj"].tensor[3, 0, 0] += 1
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        check_fingerprints(reading.fingerprints, shards)


def test_other_tensors_are_refused_by_name(tmp_path):
    build_family("qwen3_moe").save_pretrained(tmp_path)
    other = build_family("qwen3_moe", moe_intermediate_size=32, num_hidden_layers=3)
    plan = trace_load(other, read_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"missing: .*layers\.2.*another shape: .*experts") as refused:
        plan.refuse_other_tensors(tmp_path)
    assert "\n" not in str(refused.value)


def test_one_expert_of_another_shape_is_refused_by_name(tmp_path):
    build_family("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    plan = trace_load(build_family("qwen3_moe"), read_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"do not fit each other: model\.layers\.1\.mlp\.experts\.down_proj"):
        plan.refuse_other_tensors(tmp_path)
