"""`expertmesh inspect` and `expertmesh export` on every kind of folder, whole and damaged; and saving to a URL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import TESTS, clean_environment, run_ranks
from ranks.models import build
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertmesh import cli
from expertmesh.checkpoint.checkpoint import Checkpoint, save_model
from expertmesh.checkpoint.export import PEAK_BYTES, export
from expertmesh.checkpoint.inspection import inspect, verify
from expertmesh.checkpoint.inspection_table import table
from expertmesh.checkpoint.sizes import format_size, parse_size
from expertmesh.errors import CheckpointError, ConfigError, ExpertMeshError

MESH = {"dp_replicate": 1, "dp_shard": 1, "efsdp": 1, "ep": 1, "world_size": 1}


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


def write(model: nn.Module, folder: Path, format: str = "hf") -> Path:
    """A checkpoint after one step of training."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Checkpoint(folder, format=format, max_shard_size=60_000) as checkpoint:
        checkpoint.add_model(model)
        checkpoint.add_optimizer(model, optimizer)
        checkpoint.folder.joinpath("tokenizer.json").write_text("{}")
        checkpoint.folder.joinpath("trainer_state.json").write_text('{"global_step": 1}')
        checkpoint.commit(step=1, mesh=MESH)
    return folder


def flip_a_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_weights(found: dict[str, torch.Tensor], model: PreTrainedModel, dtype: torch.dtype, scratch: Path):
    model.save_pretrained(scratch)
    expected = weights_of(scratch)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


def run(capsys: pytest.CaptureFixture, command: str, *arguments: object) -> tuple[int, str]:
    status = cli._COMMANDS[command]([str(argument) for argument in arguments])
    return status, capsys.readouterr().out


def test_a_checkpoint_is_shown_in_a_table_of_80_columns(model, tmp_path, capsys):
    folder = write(model, tmp_path / "run" / "checkpoint-1")
    status, shown = run(capsys, "inspect", folder, "--verify")
    assert status == 0
    assert all(len(line) <= 80 for line in shown.splitlines()[1:])
    for row in (
        "kind         expertmesh checkpoint",
        "complete     yes",
        "step         1",
        "mesh         dp_replicate 1 x dp_shard 1 x efsdp 1 x ep 1 on 1 processes",
        "model        Qwen3MoeForCausalLM",
        "layers       2",
        "experts      8 a layer, each under names of its own",
        "parameters   51,936 in 69 tensors",
        "dtypes       float32 100.0%",
        "stock from_pretrained finds every tensor",
    ):
        assert f"\n  {row}" in shown or row in shown, shown
    sizes = dict(re.findall(r"^  (weights|optimizer|rest|all) +(\d+) ", shown, re.M))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert int(sizes["all"]) == len(files) == sum(int(sizes[part]) for part in ("weights", "optimizer", "rest"))
    assert int(sizes["weights"]) == len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("damage", ["truncate", "remove"])
@pytest.mark.parametrize("pattern", ["model-00002*", "optimizer/*.distcp", "config.json"])
def test_a_cut_or_missing_file_makes_a_checkpoint_incomplete(model, tmp_path, capsys, pattern, damage):
    folder = write(model, tmp_path / "checkpoint-1")
    (victim,) = folder.glob(pattern)
    victim.unlink() if damage == "remove" else victim.write_bytes(victim.read_bytes()[:-8])
    status, shown = run(capsys, "inspect", folder)
    assert status == 1 and "complete     NO" in shown
    (problem,) = inspect(folder).problems
    assert str(victim) in problem and "\n" not in problem


@pytest.mark.parametrize("pattern", ["model-00002*", "optimizer/*.distcp", "tokenizer.json", "optimizer/.metadata"])
def test_verify_names_the_file_that_was_altered(model, tmp_path, pattern):
    folder = write(model, tmp_path / "checkpoint-1")
    (victim,) = folder.glob(pattern)
    flip_a_bit(victim, -1)
    found = inspect(folder)
    (problem,) = [*found.problems, *verify(found).problems][-1:]
    assert str(victim) in problem and "\n" not in problem
    assert cli.inspect([str(folder), "--verify"]) == 1


def test_what_an_unfinished_save_left_is_reported_and_is_incomplete(model, tmp_path, capsys):
    folder = write(model, tmp_path / "checkpoint-1")
    partial = shutil.copytree(folder, tmp_path / "checkpoint-1.partial")
    assert run(capsys, "inspect", folder)[0] == 0
    assert "\n  left over " in table(inspect(folder)) and inspect(folder).leftovers == (partial,)
    (partial / "expertmesh.json").unlink()
    status, shown = run(capsys, "inspect", partial)
    assert status == 1 and "complete     NO" in shown and "did not end" in shown
    (partial / "model.safetensors.index.json").unlink()
    assert run(capsys, "inspect", partial)[0] == 1


def test_stock_model_folders_are_inspected_too(model, tmp_path, capsys):
    model.bfloat16().model.norm.float()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    status, shown = run(capsys, "inspect", tmp_path, "--verify")
    assert status == 0
    assert "kind         Hugging Face model\n" in shown and "bfloat16 99.9%, float32 0.1%" in shown
    assert "69 tensors and files, of which no checksum is known" in shown
    name, tensor = "model.norm.weight", torch.zeros(4)
    (path,) = [path for path in tmp_path.glob("*.safetensors") if name in load_file(path)]
    save_file({**load_file(path), name: tensor}, path, metadata={"format": "pt"})
    status, shown = run(capsys, "inspect", tmp_path, "--verify")
    assert status == 1 and "lacks tensors of Qwen3MoeForCausalLM: model.norm.weight" in " ".join(shown.split())


def test_dcp_checkpoints_are_inspected_too(model, tmp_path, capsys):
    folder = write(model, tmp_path / "checkpoint-1", format="dcp")
    (folder / "expertmesh.json").unlink()
    status, shown = run(capsys, "inspect", folder, "--verify")
    assert status == 0
    assert "kind         Accelerate checkpoint (DCP)" in shown and "parameters   51,936 in 25 tensors" in shown
    (shard,) = (folder / "pytorch_model_fsdp_0").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])
    status, shown = run(capsys, "inspect", folder)
    assert status == 1 and "truncated" in shown


def test_an_adapter_is_shown_but_is_no_model_to_export(tmp_path, capsys):
    save_file({"base_model.lora_A.weight": torch.ones(4, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    status, shown = run(capsys, "inspect", tmp_path)
    assert status == 0 and "kind         PEFT adapter" in shown and "parameters   8 in 1 tensors" in shown
    with pytest.raises(CheckpointError, match="--merge"):
        export(tmp_path, str(tmp_path / "out"))


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no model"):
        inspect(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError, match=r"1 checkpoints: name one, checkpoint-5"):
        inspect(tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", None])
def test_an_exported_model_is_stock_and_has_no_training_state(model, tmp_path, capsys, dtype):
    folder, output = write(model, tmp_path / "checkpoint-1"), tmp_path / "deep" / "model"
    options = ["--dtype", dtype] if dtype else []
    assert run(capsys, "export", folder, output, "--max-shard-size", "50KB", *options) == (0, f"saved to {output}\n")
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    assert_same_weights(weights_of(output), model, torch_dtype, tmp_path / "stock")
    assert json.loads((output / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
    assert max(path.stat().st_size for path in output.glob("*.safetensors")) < 60_000
    names = {path.name for path in output.iterdir() if path.suffix != ".safetensors"}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", "expertmesh.json",
    }  # fmt: skip
    loaded, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert loaded.dtype == torch_dtype and not any(report.values())
    assert not verify(inspect(output)).problems and inspect(output).step == 1
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_tensors_that_are_no_floats_or_are_kept_in_float32_stay(tmp_path):
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock" / "model.safetensors"
    extra = {
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "small": torch.ones(2).to(torch.float8_e4m3fn),
    }
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    export(tmp_path / "stock", str(tmp_path / "out"), dtype=torch.bfloat16)
    exported = weights_of(tmp_path / "out")
    kept = {name for name, tensor in exported.items() if tensor.dtype != torch.bfloat16}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.bfloat16)
    in_float32 = {name for name, tensor in stock.state_dict().items() if tensor.dtype == torch.float32}
    assert in_float32 and kept == in_float32 | extra.keys()
    for name, tensor in extra.items():
        assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8))


def test_values_beyond_float16_are_refused_and_nothing_is_left(model, tmp_path):
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    folder = write(model, tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has values that float16 cannot hold"):
        export(folder, str(tmp_path / "out"), dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_quantized_weights_are_not_cast(model, tmp_path):
    model.save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized"):
        export(tmp_path / "stock", str(tmp_path / "out"), dtype=torch.bfloat16)
    export(tmp_path / "stock", str(tmp_path / "out"))
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_a_damaged_checkpoint_is_not_exported(model, tmp_path, format):
    folder = write(model, tmp_path / "checkpoint-1", format)
    model.config.save_pretrained(tmp_path / "config")
    victim = next(folder.glob("model-00003*" if format == "hf" else "pytorch_model_fsdp_0/*.distcp"))
    flip_a_bit(victim, -1)
    with pytest.raises(CheckpointError, match=re.escape(str(victim))):
        export(folder, str(tmp_path / "out"), config=str(tmp_path / "config"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_dcp_checkpoint_becomes_the_published_model(family, tmp_path):
    model = build(family)
    folder = write(model, tmp_path / "checkpoint-1", format="dcp")
    with pytest.raises(ConfigError, match=r"no config.json: pass --config"):
        export(folder, str(tmp_path / "out"))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "config")
    export(folder, str(tmp_path / "out"), config=str(tmp_path / "config"), dtype=torch.float32)
    assert_same_weights(weights_of(tmp_path / "out"), model, torch.float32, tmp_path / "stock")


def test_the_wrong_configuration_for_a_dcp_checkpoint_is_refused_by_name(model, tmp_path):
    folder = write(model, tmp_path / "checkpoint-1", format="dcp")
    other = build("qwen3_moe", num_hidden_layers=3)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\."):
        export(folder, str(tmp_path / "out"), config=str(tmp_path / "other"))


def test_only_an_empty_output_is_written_without_overwrite(model, tmp_path):
    folder, output = write(model, tmp_path / "checkpoint-1"), tmp_path / "out"
    output.mkdir()
    export(folder, str(output))
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        export(folder, str(output))
    export(folder, str(output), dtype=torch.bfloat16, max_shard_size=40_000, overwrite=True)
    assert (output / "notes.txt").read_text() == "mine"
    assert inspect(output).parts["weights"].files > 2 and not verify(inspect(output)).problems
    with pytest.raises(ConfigError, match="the checkpoint itself"):
        export(folder, str(folder), overwrite=True)


def test_exporting_a_large_model_takes_little_memory(tmp_path):
    weights = {"part": torch.ones(200 * 2**20 // 4)}
    for name, tensors in {"large": weights, "small": {"part": torch.ones(4)}}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text("{}")
    program = (
        "import resource, sys, torch; from pathlib import Path; from expertmesh.checkpoint.export import export\n"
        "export(Path(sys.argv[1]), sys.argv[1] + '-out', dtype=torch.float16)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = {
        name: 1024
        * int(
            subprocess.run(
                [sys.executable, "-c", program, tmp_path / name],
                env=clean_environment(), capture_output=True, text=True, check=True, timeout=120,
            ).stdout
        )
        for name in ("small", "large")
    }  # fmt: skip
    assert peaks["large"] - peaks["small"] < PEAK_BYTES, peaks


def test_export_to_a_url_streams_whole_files_and_says_so(model, tmp_path, capsys):
    folder, output = write(model, tmp_path / "checkpoint-1"), f"file://{tmp_path}/bucket/model"
    status, said = run(capsys, "export", folder, output, "--dtype", "bf16", "--max-shard-size", "40KB")
    assert status == 0 and "takes no byte ranges" in said
    assert_same_weights(weights_of(tmp_path / "bucket" / "model"), model, torch.bfloat16, tmp_path / "stock")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bucket" / "model").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="--overwrite"):
        export(folder, output)
    # Stock Transformers would prefer a single file to the new index.
    save_file({"old": torch.ones(1)}, tmp_path / "bucket" / "model" / "model.safetensors")
    export(folder, output, overwrite=True)
    assert_same_weights(weights_of(tmp_path / "bucket" / "model"), model, torch.float32, tmp_path / "stock")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        export(folder, "nothing-like-this://bucket/model")


def test_two_ranks_save_a_sharded_model_to_a_url(tmp_path):
    ranks = run_ranks(TESTS / "ranks" / "save_to_url.py", 2, tmp_path)
    # Once for each of the two saves.
    assert [rank.stdout.count("takes no byte ranges") for rank in ranks] == [2, 0]
    expected, found = weights_of(tmp_path / "stock"), weights_of(tmp_path / "url")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(list((tmp_path / "url").glob("*.safetensors"))) > 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "url")
    # Rank 1 could not write its file: both say so, and there is no index.
    assert all("refused: cannot write the weights" in rank.stdout and "[rank 1 of 2]" in rank.stdout for rank in ranks)
    assert not (tmp_path / "blocked" / "model.safetensors.index.json").exists()


def test_saving_to_a_url_in_one_process_is_stock(model, tmp_path):
    save_model(model, f"file://{tmp_path}/url")
    assert_same_weights(weights_of(tmp_path / "url"), model, torch.float32, tmp_path / "stock")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("200", 200), ("7kb", 7000), ("1TB", 10**12)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ExpertMeshError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 KB"), (56_700_000, "56.7 MB")])
def test_sizes_are_written(nbytes, text):
    assert format_size(nbytes) == text
