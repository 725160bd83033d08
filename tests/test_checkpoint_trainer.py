"""`transformers.Trainer`, and TRL's trainer on top of it, with checkpoints that any mesh resumes.

What is resumed is compared with the run that saved and went on: parameters to the bit, the next three losses to 1e-5
relative (float32; sums are taken in another order).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from expertmesh_plugins.accelerate.parallelism import ExpertMeshConfig
from peft import PeftModel
from processes import ROOT, TESTS, run_command
from ranks.models import batches, build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from expertmesh.errors import CONFIG_EXIT_CODE

SCRIPTS = TESTS / "scripts"
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
CONFIG = ("--config", ROOT / "launch_configs" / "ep2_cpu.yaml")
ASYNC = ("--parallelism_config_ep_async_save", "true")


def launch(processes, ep_size, script, *arguments, options=()):
    mesh = ("--num_processes", str(processes), "--parallelism_config_ep_size", str(ep_size))
    return run_command((*LAUNCH, *CONFIG, *mesh, *options, SCRIPTS / script, *arguments), timeout=400)


def reports(finished):
    assert finished.returncode == 0, finished.output
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"')]


def assert_goes_on(resumed, saved):
    assert resumed["begin"] == saved["begin"]
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def four(folder):
    """4 processes, ep 4: an uninterrupted run that saved after steps 2 and 4, and one of LoRA adapters."""
    return reports(launch(4, 4, "checkpoint_trainer.py", folder / "four", "train", "lora-train"))


@pytest.fixture(scope="module")
def two(four, folder):
    """2 processes, ep 2, written in the background: `best`; then it resumes what four processes saved."""
    source = folder / "four" / "train" / "checkpoint-2"
    words = ("train", "best", f"resume:{source}", f"lora-resume:{folder / 'four' / 'lora-train' / 'checkpoint-2'}")
    return reports(launch(2, 2, "checkpoint_trainer.py", folder / "two", *words, options=ASYNC))


@pytest.fixture(scope="module")
def one(four, two, folder):
    """1 process; it resumes the newest complete checkpoint of a folder, and what the others saved."""
    newest = folder / "one" / "train"
    shutil.copytree(folder / "four" / "train" / "checkpoint-2", newest / "checkpoint-2")
    (newest / "checkpoint-4.partial" / "checkpoint-4").mkdir(parents=True)
    words = ("resume", f"resume:{folder / 'two' / 'train' / 'checkpoint-2'}")
    lora = f"lora-resume:{folder / 'four' / 'lora-train' / 'checkpoint-2'}"
    finished = launch(1, 1, "checkpoint_trainer.py", folder / "one", *words, lora)
    return reports(finished), finished.output


def test_other_numbers_of_processes_go_on_where_it_was_saved(four, two, one):
    (saved, _), (other_saved, _, on_two, _), (newest, from_two, _) = four, two, one[0]
    assert_goes_on(on_two, saved)
    assert_goes_on(newest, saved)
    assert_goes_on(from_two, other_saved)


def test_adapters_go_on_where_they_were_saved(four, two, one):
    (_, saved), (*_, on_two), (*_, on_one) = four, two, one[0]
    assert_goes_on(on_two, saved)
    assert_goes_on(on_one, saved)


def test_a_partial_checkpoint_is_reported_once_and_ignored(one, folder):
    reported = [line for line in one[1].splitlines() if "was left by a save that did not end" in line]
    assert len(reported) == 1
    assert str(folder / "one" / "train" / "checkpoint-4.partial") in reported[0]


def test_the_best_model_is_there_at_the_end(two):
    _, best, *_ = two
    assert best["end"] == best["begin"]


def test_only_the_best_and_the_newest_checkpoint_are_kept_and_the_state_says_where(two, folder):
    output = folder / "two" / "best"
    assert sorted(path.name for path in output.iterdir()) == ["checkpoint-1", "checkpoint-5"]
    for step in (1, 5):
        state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(output / "checkpoint-1")


@pytest.mark.parametrize("checkpoint", ["four/train/checkpoint-4", "two/best/checkpoint-5"])
def test_every_checkpoint_is_an_ordinary_model(two, folder, checkpoint):
    _, loading = AutoModelForCausalLM.from_pretrained(folder / checkpoint, output_loading_info=True)
    assert not any(loading.values())


def test_a_checkpoint_of_adapters_is_an_ordinary_adapter(four, folder):
    saved = folder / "four" / "lora-train" / "checkpoint-4"
    assert not list(saved.glob("model*"))
    base = build(hidden_size=32, moe_intermediate_size=24, rope_theta=10000.0)
    adapted = PeftModel.from_pretrained(base, saved)
    tensors = load_file(saved / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(adapted.get_parameter(name.replace(".weight", ".default.weight")), tensor)


def test_a_save_that_fails_ends_with_one_line_and_leaves_the_one_before(tmp_path):
    ended = launch(2, 2, "checkpoint_sft.py", tmp_path / "out", "full-disk")
    assert ended.returncode == CONFIG_EXIT_CODE, ended.output
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("expertmesh:")]
    assert "File too large" in line
    assert "checkpoint-4" in line
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2"]
    losses = [float(text.split("'")[0]) for text in ended.stdout.split("{'loss': '")[1:]]
    (resumed,) = reports(launch(1, 1, "checkpoint_sft.py", tmp_path / "out", "resume"))
    assert resumed["losses"][-2:] == pytest.approx(losses[-2:], rel=1e-3), "Trainer prints four digits"
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-4"]


class Pushing(TrainerCallback):
    """Looks at the folders at the moment a push begins, and ends the training there: nothing may leave this machine."""

    class Begun(Exception):
        pass

    def on_push_begin(self, arguments, state, control, **_):
        self.found = sorted(path.name for path in Path(arguments.output_dir).iterdir())
        raise self.Begun


def test_a_checkpoint_is_pushed_when_it_is_complete(tmp_path):
    AcceleratorState._reset_state(True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, save_steps=1, save_total_limit=1, hub_always_push=True,
        report_to=[], use_cpu=True, disable_tqdm=True, parallelism_config=ExpertMeshConfig(ep_async_save=True),
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in batches(1, 16, 8)[0]]
    pushing = Pushing()
    trainer = Trainer(build(), arguments, train_dataset=data, callbacks=[pushing])
    # Asked for at construction, the repository would be created on the Hub.
    arguments.push_to_hub = True
    with pytest.raises(Pushing.Begun):
        trainer.train()
    assert pushing.found == ["checkpoint-1"]
    arguments.push_to_hub = False
    # The next run replaces that checkpoint, by one that the background writes.
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2"]
    AcceleratorState._reset_state(True)
