"""The whole fine-tune in one process: it learns, leaves a stock model, and leaves nothing where it refuses."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml
from processes import Finished, run_command

from expertmesh.errors import CONFIG_EXIT_CODE, ModelError
from expertmesh.finetune.export import check_in_stock_process, stock_environment
from expertmesh.finetune.recipe import Recipe

TINY = {
    "model_config": {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    },
    "tokenizer": {"train_bpe": 400},
    "data": "python-docs",
    "eval_fraction": 0.1,
    "sequence_length": 32,
    "per_device_batch_size": 8,
    "learning_rate": 0.01,
    "max_steps": 20,
    "logging_steps": 5,
    "sample_tokens": 8,
}


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**TINY, "output_dir": str(tmp_path / "models" / "out")}))
    return path


def finetune(recipe_file, *overrides: str, env: dict[str, str] | None = None) -> Finished:
    environment = {"HF_DATASETS_CACHE": str(recipe_file.parent / "cache"), **(env or {})}
    command = [sys.executable, "-m", "expertmesh.finetune", recipe_file, *overrides]
    return run_command(command, timeout=120, env=environment)


def test_it_learns_and_leaves_a_stock_model(recipe_file):
    finished = finetune(recipe_file)
    assert finished.returncode == 0, finished.output
    losses = [
        float(loss) for loss in re.findall(r"^step \d+/20: loss ([\d.]+), [\d,]+ tokens/s", finished.stdout, re.M)
    ]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert len(re.findall(r"expert imbalance [\d.]+$", finished.stdout, re.M)) == 4
    before, after = map(float, re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after", finished.stdout).groups())
    assert 300 < before < 600 and after < before / 2
    assert "reloaded by stock Transformers, it says:\nThe" in finished.stdout
    output = recipe_file.parent / "models" / "out"
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["use_cache"]
    assert (output / "generation_config.json").is_file() and (output / "tokenizer.json").is_file()


def test_checkpoints_are_kept_beside_the_model_and_gone_on_from(recipe_file):
    output = recipe_file.parent / "models" / "out"
    steps = ("--max_steps", "6", "--logging_steps", "1", "--save_steps", "2", "--save_total_limit", "2")
    first = finetune(recipe_file, *steps, "--resume", "auto")
    assert first.returncode == 0, first.output
    assert f"no complete checkpoint in {output}: starting anew" in first.stdout
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}

    # As a kill at step 5, in the middle of a save, would leave it.
    for path in [path for path in output.iterdir() if path.is_file()]:
        path.unlink()
    (output / "checkpoint-6").rename(output / "checkpoint-6.partial")
    (output / "checkpoint-5").mkdir()
    again = finetune(recipe_file, *steps, "--resume", "auto", "--save_async", "true")
    assert again.returncode == 0, again.output
    assert f"resuming from {output}/checkpoint-4" in again.stdout
    assert f"{output}/checkpoint-5 is incomplete and ignored" in again.stdout
    assert again.output.count("checkpoint-6.partial") == 1
    assert reports(again) == reports(first)[4:] and len(reports(again)) == 2
    perplexities = [re.search("^held-out perplexity: .*", run.stdout, re.M)[0] for run in (first, again)]
    assert perplexities[0] == perplexities[1]
    assert (output / "checkpoint-6" / "expertmesh.json").is_file()
    assert (output / "config.json").is_file() and (output / "tokenizer.json").is_file()


def reports(finished: Finished) -> list[str]:
    """Step and loss of each report."""
    return re.findall(r"^step \d+/\d+: loss [\d.]+", finished.stdout, re.M)


def test_chats_without_packing_replace_an_older_model(recipe_file):
    chats = recipe_file.parent / "chats.jsonl"
    turns = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Yes, of course."}]
    chats.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(40)))
    output = recipe_file.parent / "models" / "out"
    output.mkdir(parents=True)
    (output / "config.json").write_text("{}")
    (output / "old.txt").write_text("older")
    finished = finetune(
        recipe_file, "--data", str(chats), "--messages_column", "messages", "--packing", "false", "--overwrite", "true"
    )  # fmt: skip
    assert finished.returncode == 0, finished.output
    # What is no part of a model is somebody's.
    assert (output / "old.txt").read_text() == "older" and (output / "model.safetensors.index.json").is_file()
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert "user\nThe\nassistant\nYes," in finished.stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("--max_step", "3"), "did you mean `max_steps`?"),
        (("--sequence_length", "128"), "more than the model's 64"),
        (("--model_config.vocab_size", "50"), "vocab_size is 50"),
        (("--model_config.num_expert", "4"), "did you mean `num_experts`?"),
        (("--model_config.model_type", "qwen3_mo"), "did you mean `qwen3_moe`?"),
        (("--model_config", "null", "--model", "no/such-model", "--tokenizer", "null"), "cannot be loaded"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(recipe_file, overrides, expected):
    finished = finetune(recipe_file, *overrides)
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = finished.stderr.strip().splitlines()
    assert line.startswith("expertmesh: ") and expected in line
    assert not (recipe_file.parent / "models").exists()


def test_a_crash_leaves_nothing(recipe_file):
    crash = recipe_file.parent / "sitecustomize.py"
    crash.write_text(
        "import transformers\n"
        "def crash(self, *args, **kwargs):\n    raise RuntimeError('crashed on purpose')\n"
        "transformers.Trainer.training_step = crash\n"
    )
    finished = finetune(recipe_file, env={"PYTHONPATH": str(recipe_file.parent)})
    assert finished.returncode == 1 and "crashed on purpose" in finished.stderr, finished.output
    assert list((recipe_file.parent / "models").iterdir()) == []


def test_missing_weights_are_an_error_but_are_kept(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**TINY["model_config"], vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["stranger"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        check_in_stock_process(Recipe(output_dir=str(tmp_path)))
    assert "model.norm.weight" in str(caught.value) and "stranger" in str(caught.value)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_stock_process_inherits_nothing_of_a_launch():
    launched = {"RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "PARALLELISM_CONFIG_EP_SIZE": "2"}
    kept = stock_environment({**launched, "PATH": "/bin", "FSDP_VERSION": "2", "MASTER_ADDR": "localhost"})
    assert kept == {"PATH": "/bin", "EXPERTMESH_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
