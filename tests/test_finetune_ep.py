"""The fine-tune under a real `accelerate launch`: expert parallelism must not change what is learned."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from processes import ROOT, Finished, run_command
from test_finetune_run import TINY

from expertmesh.errors import CONFIG_EXIT_CODE

EP2 = ROOT / "launch_configs" / "ep2_cpu.yaml"
PERPLEXITIES = re.compile(r"^held-out perplexity: ([\d.]+) before, ([\d.]+) after$", re.M)


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump({**TINY, "packing": False, "max_steps": 8, "logging_steps": 4, "learning_rate": 3e-3})
    )
    return path


def perplexities(finished: Finished) -> tuple[float, float]:
    assert finished.returncode == 0, finished.output
    before, after = PERPLEXITIES.search(finished.stdout).groups()
    return float(before), float(after)


def launcher() -> list[str | Path]:
    return [Path(sys.executable).with_name("accelerate"), "launch", "--config", EP2]


def run(recipe_file: Path, start: list[str | Path], batch_size: int, name: str) -> Finished:
    arguments = [recipe_file, "--per_device_batch_size", str(batch_size), "--output_dir", recipe_file.with_name(name)]
    environment = {"HF_DATASETS_CACHE": str(recipe_file.with_name("cache"))}
    command = [*start, "-m", "expertmesh.finetune", *arguments]
    return run_command(command, timeout=240, env=environment)


def test_two_ranks_with_expert_parallelism_learn_what_one_process_learns(recipe_file):
    alone = run(recipe_file, [sys.executable], 8, "alone")
    launched = run(recipe_file, launcher(), 4, "launched")
    assert perplexities(launched) == pytest.approx(perplexities(alone), rel=1e-3)
    # Rank 0 alone reports, and the loss is of both ranks.
    reports = [re.findall(r"^step (\d+)/8: loss ([\d.]+)", finished.stdout, re.M) for finished in (alone, launched)]
    assert reports[0] == reports[1] and len(reports[0]) == 2
    configs = [
        json.loads(recipe_file.with_name(name).joinpath("config.json").read_text()) for name in ("alone", "launched")
    ]
    assert configs[0] == configs[1]
    assert not list(recipe_file.parent.glob(".*"))


def test_a_refused_recipe_says_so_once(recipe_file):
    finished = run(recipe_file, launcher(), 0, "launched")
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    assert finished.stderr.count("expertmesh: per_device_batch_size must be at least 1") == 1, finished.output
    assert not recipe_file.with_name("launched").exists()
