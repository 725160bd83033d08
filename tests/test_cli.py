"""The console script: help, refusals, what `finetune` starts, and what `doctor` finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from processes import ROOT, Finished, run_command

from expertmesh import cli, doctor
from expertmesh.errors import CONFIG_EXIT_CODE, ConfigError

SCRIPT = Path(sys.executable).with_name("expertmesh")


def expertmesh(*arguments: str, env: dict[str, str] | None = None) -> Finished:
    return run_command([SCRIPT, *arguments], timeout=60, env=env)


def test_help_names_every_command_and_imports_no_library():
    finished = expertmesh("--help")
    assert finished.returncode == 0 and finished.stderr == ""
    for name in cli._COMMANDS:
        assert f"\n  {name} " in finished.stdout
    code = "import sys, expertmesh.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert run_command([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("finetun",), "'finetun' is not a command"),
        (("finetune", "recipe.yaml", "--config"), "--config has no value"),
        (("finetune", "recipe.yaml", "--config", "nowhere.yaml"), "no launch configuration 'nowhere.yaml'"),
        (("finetune", "nowhere.yaml"), "there is no recipe 'nowhere.yaml'"),
        (("doctor", "--fast"), "doctor takes no arguments"),
        (("inspect",), "arguments are required: checkpoint"),
        (("inspect", "nowhere"), "no folder 'nowhere'"),
        (("export", "nowhere", "out"), "no folder 'nowhere'"),
        (("export", "nowhere", "out", "--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)
def test_refusals_are_one_line(arguments, expected):
    finished = expertmesh(*arguments)
    assert finished.returncode == CONFIG_EXIT_CODE
    (line,) = finished.stderr.strip().splitlines()
    assert line.startswith("expertmesh: ") and expected in line


def test_finetune_help_lists_the_keys():
    assert "learning_rate" in expertmesh("finetune", "--help").stdout


def test_finetune_launches_only_with_a_launch_configuration():
    module = ["-m", "expertmesh.finetune", "recipe.yaml", "--max_steps", "3"]
    config, rest = cli._take_launch_config(
        ["recipe.yaml", "--config", str(ROOT / "launch_configs/ep2_cpu.yaml"), "--max_steps", "3"]
    )
    command = cli.finetune_command(config, rest)
    assert command[-5:] == module and command[-7:-5] == ["--config_file", str(ROOT / "launch_configs/ep2_cpu.yaml")]
    assert cli.finetune_command(None, rest) == [sys.executable, *module]


def test_doctor_finds_this_installation_in_order():
    finished = expertmesh("doctor")
    assert finished.returncode == 0, finished.output
    for line in ("torch", "transformers", "accelerate", "launch hook", "dispatcher all_to_all", "compute grouped_mm"):
        assert f"\nok   {line} " in finished.stdout


def test_doctor_says_when_the_hook_is_off():
    finished = expertmesh("doctor", env={"EXPERTMESH_AUTOLOAD": "0"})
    assert finished.returncode == 1
    assert "switched off: unset EXPERTMESH_AUTOLOAD" in finished.stdout


def test_an_old_or_missing_library_comes_with_its_remedy():
    old = doctor._version(Requirement("torch>=99"), None)
    assert old.broken and "is not >=99: `pip install 'torch>=99'`" in old.text
    missing = doctor._version(Requirement("no-such-library>=1"), "trl")
    assert not missing.works and not missing.broken and "pip install 'expertmesh[trl]'" in missing.text


def test_a_choice_that_cannot_be_made_gives_the_reason():
    def refuse(name: str) -> None:
        raise ConfigError(f"{name} needs a GPU")

    finding = doctor._choice("dispatcher", "deepep", refuse)
    assert str(finding).startswith("--") and "deepep needs a GPU" in str(finding) and not finding.broken
