"""Weights that every rank reads its own share of: the same training, no byte too many, and one error for all."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from processes import TESTS, run_command, run_ranks
from ranks.models import build
from safetensors.torch import load_file
from test_accelerate import ACCELERATE, EP2
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from expertmesh.checkpoint import save_model

PROGRAM = TESTS / "ranks" / "deferred.py"
MiB = 1 << 20

EP2_MESH = dict(dp_shard_size=2, ep_size=2)
SHARED = dict(dp_shard_size=4, ep_size=2)
EIGHT = dict(dp_shard_size=8, ep_size=8)
REPLICATED = dict(dp_replicate_size=2, dp_shard_size=2, ep_size=2)


def ranks(what, folder, mesh, options, environment=None):
    number = mesh["dp_shard_size"] * mesh.get("dp_replicate_size", 1)
    environment = {"PARALLELISM_CONFIG_EP_SIZE": str(mesh["ep_size"]), **(environment or {})}
    finished = run_ranks(PROGRAM, number, what, folder, json.dumps(options), env=environment, timeout=400)
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in finished]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build().save_pretrained(folder, max_shard_size="60KB")
    return folder


CASES = {
    "plain": {},
    "adapters": dict(adapters=True),
    "adapters in mixed precision": dict(adapters=True, mixed_precision="bf16", load=dict(dtype="bfloat16")),
    "mixed precision": dict(mixed_precision="bf16", load=dict(dtype="bfloat16")),
    "cast to bf16": dict(mixed_precision="bf16", cast="bfloat16"),
    "resized": dict(resize=104),
    "forward first": dict(forward_on="all"),
    "forward first on one rank": dict(forward_on="0"),
    "a model never prepared": dict(reference=True),
    "bf16 files": dict(folder="bf16", mixed_precision="bf16"),
    "tied": dict(folder="tied"),
}


def assert_same_training(folder, mesh, cases):
    cases = {name: dict(mesh=mesh, **options) for name, options in cases.items()}
    for number, rank in enumerate(ranks("compare", folder, mesh, cases)):
        for name, (ours, stock) in rank.items():
            late = cases[name].get("forward_on") in ("all", str(number))
            assert (bool(ours["deferred"]), stock["deferred"]) == (not late, 0), (name, number)
            assert ours["same"] == stock["same"], (name, number)


def test_training_is_the_same(folder, tmp_path):
    build(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    build().to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    cases = {
        name: {**options, "folder": str(tmp_path / options["folder"])} if "folder" in options else options
        for name, options in CASES.items()
    }
    assert_same_training(folder, EP2_MESH, cases)


@pytest.mark.parametrize("mesh", [SHARED, REPLICATED, dict(dp_shard_size=2, ep_size=1)], ids=str)
def test_training_is_the_same_on_every_mesh(folder, mesh):
    names = ("plain", "adapters in mixed precision")
    assert_same_training(folder, mesh, {name: CASES[name] for name in names})


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """About 200 MB; the largest tensor is a fortieth of it."""
    folder = tmp_path_factory.mktemp("larger")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, moe_intermediate_size=192, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="50MB")
    return folder


def test_eight_ranks_read_every_byte_of_the_experts_once(larger, folder):
    measured = ranks("measure", larger, EIGHT, dict(mesh=EIGHT, tiny=str(folder)))
    stored = {name: tensor for file in larger.glob("*.safetensors") for name, tensor in load_file(file).items()}
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    total = sum(size.values())
    read = Counter()
    for name, _, length in measured[0]["runs"]:
        read[name] += length
    experts = [name for name in size if ".experts." in name]
    assert len(experts) == 10 * 32 * 3
    assert {name: read[name] for name in experts} == {name: size[name] for name in experts}
    assert all(size[name] <= read[name] <= 8 * size[name] for name in size)
    # The operating system's count has headers, samples and what Python reads for itself on top.
    assert sum(rank["read"] for rank in measured) == sum(read.values()) == total
    assert sum(rank["characters"] for rank in measured) < total * 1.05 + 8 * MiB


@pytest.mark.parametrize("mesh", [dict(dp_shard_size=4, ep_size=4), SHARED, dict(dp_shard_size=4, ep_size=1)], ids=str)
def test_a_rank_needs_its_shard_and_little_more(larger, folder, mesh):
    for rank in ranks("measure", larger, mesh, dict(mesh=mesh, tiny=str(folder))):
        # About 6 MB of modules, traced tensors and tables of files are in it.
        assert rank["growth"] < rank["shard"] + 1.3 * rank["largest"], rank


def hub_cache(home: Path, model, commit: str) -> None:
    """A Hub cache by hand: files once, under their hash, linked into the snapshot of one commit."""
    repository = home / "hub" / "models--someone--moe"
    model.save_pretrained(home / "files")
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in (home / "files").iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (repository / "snapshots" / commit / file.name).symlink_to(
            os.path.relpath(blob, repository / "snapshots" / commit)
        )


@pytest.mark.parametrize("same", [True, False], ids=["equal content", "another revision"])
def test_every_rank_may_have_a_cache_of_its_own(tmp_path, same):
    model = build()
    hub_cache(tmp_path / "0", model, "a" * 40)
    with torch.no_grad():
        if not same:
            for parameter in model.parameters():
                parameter.add_(1e-3)
    hub_cache(tmp_path / "1", model, "b" * 40)
    homes = {"DEFERRED_HOMES": str(tmp_path)}
    first, second = ranks("refused", "someone/moe", EP2_MESH, dict(mesh=EP2_MESH), homes)
    assert first == second
    if same:
        assert first["error"] is None
        return
    assert "the ranks have different files for the same weights" in first["error"]
    assert f"rank 0: {tmp_path}/0/hub/models--someone--moe/snapshots/aaaa" in first["error"]
    assert f"rank 1: {tmp_path}/1/hub/models--someone--moe/snapshots/bbbb" in first["error"]


def test_a_file_that_one_rank_lost_stops_all(tmp_path):
    for rank in (0, 1):
        hub_cache(tmp_path / str(rank), build(), "a" * 40)
    options = dict(mesh=EP2_MESH, remove_on="1")
    first, second = ranks("refused", "someone/moe", EP2_MESH, options, {"DEFERRED_HOMES": str(tmp_path)})
    assert first == second
    assert f"{tmp_path}/1/hub" in first["error"] and "[rank 1 of 2]" in first["error"]


@pytest.mark.parametrize("fault", ["shifted", "one element"])
def test_a_fault_in_the_reader_stops_all_ranks(folder, fault):
    first, second = ranks("refused", folder, EP2_MESH, dict(mesh=EP2_MESH, fault=fault))
    assert first == second
    assert "model.layers.1.mlp.experts.down_proj" in first["error"] and "rank 1" in first["error"]


def launched(kind, folder, output, environment=None):
    script = TESTS / "scripts" / "deferred.py"
    finished = run_command((*ACCELERATE, *EP2, script, kind, folder, output), timeout=240, env=environment)
    assert finished.returncode == 0, finished.output
    lines = finished.stdout.splitlines()
    return sum(line == "DeferredParameter" for line in lines), [line for line in lines if line.startswith('{"')]


@pytest.mark.parametrize("kind", ["accelerate", "trainer", "sft", "dpo"])
def test_untouched_scripts(folder, tmp_path, kind):
    deferring, ours = launched(kind, folder, tmp_path / "ours")
    reading, stock = launched(kind, folder, tmp_path / "stock", {"EXPERTMESH_DEFERRED_LOAD": "0"})
    assert (deferring, reading) == (2, 0)
    assert ours and ours == stock


def test_a_checkpoint_that_was_damaged_is_not_started_from(tmp_path):
    model = build()
    save_model(model, tmp_path / "model")
    path = next((tmp_path / "model").glob("*.safetensors"))
    flipped = bytearray(path.read_bytes())
    flipped[-100] ^= 1
    path.write_bytes(flipped)
    script = TESTS / "scripts" / "deferred.py"
    finished = run_command((*ACCELERATE, *EP2, script, "accelerate", tmp_path / "model", tmp_path / "out"), timeout=150)
    lines = [line for line in finished.stderr.splitlines() if line.startswith("expertmesh:")]
    assert finished.returncode and len(lines) == 1, finished.output
    assert path.name in lines[0] and "damaged" in lines[0]
