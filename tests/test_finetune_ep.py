"""The fine-tune under a real `accelerate launch`: neither expert parallelism nor a kill changes what is learned."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from processes import ROOT, Finished, run_command
from safetensors.torch import load_file
from test_finetune_run import TINY

from expertmesh.errors import CONFIG_EXIT_CODE, ConfigError
from expertmesh.finetune.recipe import Recipe
from expertmesh.finetune.resume import parallelism_of

EP2 = ROOT / "launch_configs" / "ep2_cpu.yaml"
PERPLEXITIES = re.compile(r"^held-out perplexity: ([\d.]+) before, ([\d.]+) after$", re.M)


STEPS = 8


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("finetune") / "recipe.yaml"
    changes = {"packing": False, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 3e-3}
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


@pytest.fixture(scope="module")
def launched(recipe_file) -> Finished:
    """An uninterrupted run on two ranks, which leaves checkpoints after 3, 6 and 8 steps."""
    return run(recipe_file, launcher(), 4, "launched", "--save_steps", "3")


def perplexities(finished: Finished) -> tuple[float, float]:
    assert finished.returncode == 0, finished.output
    before, after = PERPLEXITIES.search(finished.stdout).groups()
    return float(before), float(after)


def launcher() -> list[str | Path]:
    return [Path(sys.executable).with_name("accelerate"), "launch", "--config", EP2]


def run(
    recipe_file: Path,
    start: list[str | Path],
    batch_size: int,
    name: str,
    *options: str,
    program: tuple[str | Path, ...] = ("-m", "expertmesh.finetune"),
) -> Finished:
    arguments = [recipe_file, "--per_device_batch_size", str(batch_size), "--output_dir", recipe_file.with_name(name)]
    environment = {"HF_DATASETS_CACHE": str(recipe_file.with_name("cache"))}
    return run_command([*start, *program, *arguments, *options], timeout=300, env=environment)


def losses(recipe_file: Path, name: str) -> list[float]:
    """Those of every step, as the checkpoint after the last step remembers them."""
    state = json.loads((recipe_file.with_name(name) / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_two_ranks_with_expert_parallelism_learn_what_one_process_learns(recipe_file, launched):
    alone = run(recipe_file, [sys.executable], 8, "alone")
    assert perplexities(launched) == pytest.approx(perplexities(alone), rel=1e-3)
    # Rank 0 alone reports, and the loss is of both ranks.
    reports = [
        [float(loss) for loss in re.findall(r"^step \d+/8: loss ([\d.]+)", finished.stdout, re.M)]
        for finished in (alone, launched)
    ]
    assert reports[0] == pytest.approx(reports[1], abs=2e-3) and len(reports[0]) == STEPS
    configs = [
        json.loads(recipe_file.with_name(name).joinpath("config.json").read_text()) for name in ("alone", "launched")
    ]
    assert configs[0] == configs[1]
    assert not [path for path in recipe_file.parent.iterdir() if path.name.endswith((".partial", ".replaced"))]


def test_a_killed_run_is_resumed_on_its_ranks_and_on_one_process_with_the_same_losses(recipe_file, launched):
    program = (ROOT / "tests" / "scripts" / "killed_finetune.py", "5")
    killed = run(recipe_file, launcher(), 4, "killed", "--save_steps", "3", program=program)
    output = recipe_file.with_name("killed")
    assert killed.returncode != 0 and "step 5/8" in killed.stdout and "step 6/8" not in killed.stdout, killed.output
    assert [path.name for path in output.iterdir()] == ["checkpoint-3"]
    shutil.copytree(output, recipe_file.with_name("one"))

    resume = ("--save_steps", "3", "--resume", "auto")
    resumed = run(recipe_file, launcher(), 4, "killed", *resume)
    assert resumed.stdout.count(f"resuming from {output}/checkpoint-3") == 1, resumed.output
    assert losses(recipe_file, "killed") == pytest.approx(losses(recipe_file, "launched"), rel=1e-6)
    assert perplexities(resumed) == perplexities(launched)

    one = run(recipe_file, [sys.executable], 8, "one", *resume)
    assert losses(recipe_file, "one") == pytest.approx(losses(recipe_file, "launched"), rel=1e-4)
    assert perplexities(one) == pytest.approx(perplexities(launched), rel=1e-3)


@pytest.fixture(scope="module")
def base(recipe_file):
    """A model to adapt, and the recipe for it."""
    finished = run(recipe_file, [sys.executable], 8, "base", "--max_steps", "2", "--eval_fraction", "0")
    assert finished.returncode == 0, finished.output
    recipe = yaml.safe_load(recipe_file.read_text())
    del recipe["model_config"], recipe["tokenizer"]
    lora = recipe_file.with_name("lora.yaml")
    lora.write_text(yaml.safe_dump({**recipe, "model": str(recipe_file.with_name("base")), "lora": {"r": 4}}))
    return lora


LORA = ("--save_steps", "3", "--lora.targets", "[attention, experts, router]", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def adapters(base) -> Finished:
    """An uninterrupted run on two ranks."""
    return run(base, launcher(), 4, "adapters", *LORA)


def test_adapters_learn_and_resume_on_any_mesh_and_stock_peft_reads_them(base, adapters):
    before, after = perplexities(adapters)
    assert after < before - 1 and "reloaded by stock PEFT, it says:" in adapters.stdout
    assert len(re.findall(r"expert imbalance [\d.]+$", adapters.stdout, re.M)) == STEPS
    output = base.with_name("adapters")
    assert (output / "tokenizer.json").is_file() and not list(output.glob("model*"))
    stored = load_file(output / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base.with_name("base")
    )

    resumed = base.with_name("resumed")
    shutil.copytree(output / "checkpoint-3", resumed / "checkpoint-3")
    alone = run(base, [sys.executable], 8, "resumed", *LORA, "--resume", "auto")
    assert f"resuming from {resumed}/checkpoint-3" in alone.stdout
    # The base computes in bfloat16.
    assert losses(base, "resumed") == pytest.approx(losses(base, "adapters"), rel=2e-3)
    assert perplexities(alone) == pytest.approx((before, after), rel=5e-3)


def test_adapters_of_another_rank_are_not_gone_on_from(base, adapters):
    output = base.with_name("other-rank")
    shutil.copytree(base.with_name("adapters") / "checkpoint-3", output / "checkpoint-3")
    options = ("--save_steps", "3", "--resume", "auto", "--lora.r", "8", "--eval_fraction", "0")
    finished = run(base, launcher(), 4, "other-rank", *options)
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("expertmesh: ")]
    assert "lora_A.weight is of shape" in line and "step 4/8" not in finished.stdout


def test_checkpoints_of_a_launch_without_expert_parallelism_are_refused(recipe_file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("PARALLELISM_CONFIG_EP_SIZE", raising=False)
    assert parallelism_of(Recipe()) is None
    for recipe in (Recipe(save_steps=5), Recipe(resume="auto")):
        with pytest.raises(ConfigError, match="set `parallelism_config_ep_size`"):
            parallelism_of(recipe)


def test_a_refused_recipe_says_so_once(recipe_file):
    finished = run(recipe_file, launcher(), 0, "refused")
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    assert finished.stderr.count("expertmesh: per_device_batch_size must be at least 1") == 1, finished.output
    assert not recipe_file.with_name("refused").exists()
