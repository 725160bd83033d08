"""`accelerate launch` with an EP key: what it starts, what it tells the workers, and what it refuses before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed.run as elastic
import yaml
from launching import Launcher
from processes import ROOT, free_port, run_command
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from expertmesh.errors import CONFIG_EXIT_CODE

BIN = Path(sys.executable).parent
WAYS_TO_LAUNCH = {
    "accelerate launch": [BIN / "accelerate", "launch"],
    "accelerate-launch": [BIN / "accelerate-launch"],
    "launch module": [sys.executable, "-m", "accelerate.commands.launch"],
    "cli module": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
}
EP2_CPU = ROOT / "launch_configs" / "ep2_cpu.yaml"

SHOW = """
import json, os, sys
from accelerate import ParallelismConfig
config = ParallelismConfig()
seen = {"argv": sys.argv[1:], "type": type(config).__name__, "environ": dict(os.environ)}
if os.environ.get("RANK", "0") == "0":
    print("SHOWN " + json.dumps(seen))
"""

REFUSE = """
import os, time
from accelerate import ParallelismConfig
if os.environ["RANK"] == "1":
    time.sleep(60)
ParallelismConfig(dp_shard_size=3)
"""


@pytest.fixture
def launcher(monkeypatch):
    return Launcher(monkeypatch)


@pytest.fixture
def write_yaml(tmp_path):
    """Write a launch configuration: stock FSDP2 on 4 processes, changed by the arguments."""

    def write(parallelism=None, fsdp=None, **changes):
        content = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2, **(fsdp or {})}}
        content |= {"parallelism_config": parallelism} if parallelism else {}
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return path

    return write


def shown(finished):
    """What the script `SHOW` saw on rank 0."""
    assert finished.returncode == 0, finished.output
    (line,) = [line for line in finished.stdout.splitlines() if "SHOWN " in line]
    return json.loads(line.partition("SHOWN ")[2])


def ours(environment):
    prefixes = ("PARALLELISM_CONFIG_EP", "PARALLELISM_CONFIG_DP", "FSDP_VERSION", "FSDP_CPU", "ACCELERATE_USE")
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


# Real launches.


@pytest.mark.parametrize("way", WAYS_TO_LAUNCH)
def test_every_way_of_launching_knows_config_and_refuses_in_one_line(way, write_yaml):
    config = write_yaml({"parallelism_config_ep_sise": 2})
    command = [*WAYS_TO_LAUNCH[way], "--config", config, "train.py", "--config", "theirs.yaml"]
    finished = run_command(command)
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"expertmesh: {config}: `parallelism_config_ep_sise`")
    assert "did you mean `parallelism_config_ep_size`" in line


def test_an_untouched_script_sees_expert_parallelism(tmp_path):
    (tmp_path / "train.py").write_text(SHOW)
    command = [*WAYS_TO_LAUNCH["accelerate launch"], "--config", EP2_CPU, "--main_process_port", free_port()]
    seen = shown(run_command([*command, tmp_path / "train.py", "--config", "theirs.yaml"]))
    assert seen["type"] == "ExpertMeshConfig"
    assert seen["argv"] == ["--config", "theirs.yaml"]
    assert seen["environ"]["WORLD_SIZE"] == "2"
    assert seen["environ"]["PARALLELISM_CONFIG_EP_SIZE"] == "2"


def test_without_an_ep_key_nothing_changes(tmp_path):
    (tmp_path / "train.py").write_text(SHOW)
    seen = shown(
        run_command([*WAYS_TO_LAUNCH["accelerate-launch"], "--cpu", "--num_processes", "1", tmp_path / "train.py"])
    )
    assert seen["type"] == "ParallelismConfig"
    assert not [name for name in seen["environ"] if name.startswith("PARALLELISM_CONFIG")]


def test_workers_that_refuse_end_the_launcher_with_their_line_and_status(tmp_path):
    (tmp_path / "train.py").write_text(REFUSE)
    command = [
        *WAYS_TO_LAUNCH["launch module"],
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    command += ["--dynamo_backend", "no", "--parallelism_config_ep_size", "2", "--main_process_port", free_port()]
    finished = run_command([*command, tmp_path / "train.py"], env={"HF_HOME": str(tmp_path)})
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = finished.stderr.splitlines()
    assert line.startswith("expertmesh: ")
    assert "dp_shard_size 3" in line


def end_with(monkeypatch, exit_codes):
    """Let torch elastic report workers that ended with these statuses, by rank, to a launch with EP."""
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in exit_codes.items()}

    def run(args):
        raise ChildFailedError("train.py", failures)

    monkeypatch.setattr(elastic, "run", run)
    launcher = Launcher(monkeypatch)
    launcher.workers("--config", EP2_CPU, "train.py")
    elastic.run(None)


def test_a_refusal_that_rank_0_could_not_explain_is_not_silent(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        end_with(monkeypatch, {0: -15, 1: CONFIG_EXIT_CODE})
    assert ended.value.code == CONFIG_EXIT_CODE
    assert capsys.readouterr().err.startswith("expertmesh: rank 1 refused its configuration")


def test_a_crash_stays_a_crash(monkeypatch):
    with pytest.raises(ChildFailedError):
        end_with(monkeypatch, {0: 1, 1: -15})


# What the workers are told.


def test_yaml_is_exported(launcher, write_yaml):
    choices = {
        "ep_size": 2,
        "ep_dispatcher": "all_to_all",
        "ep_compute": "grouped_mm",
        "ep_chunks": 3,
        "ep_overlap": False,
    }
    config = write_yaml({f"parallelism_config_{name}": value for name, value in choices.items()})
    kind, environment = launcher.workers("--config", config, "train.py")
    assert kind == "distributed"
    assert ours(environment) == {
        "PARALLELISM_CONFIG_EP_SIZE": "2",
        "PARALLELISM_CONFIG_EP_DISPATCHER": "all_to_all",
        "PARALLELISM_CONFIG_EP_COMPUTE": "grouped_mm",
        "PARALLELISM_CONFIG_EP_CHUNKS": "3",
        "PARALLELISM_CONFIG_EP_OVERLAP": "False",
        "PARALLELISM_CONFIG_EP_ACTIVATION_CHECKPOINTING": "none",
        "PARALLELISM_CONFIG_EP_LAYERS": "auto",
        "PARALLELISM_CONFIG_EP_LAYERS_ONLY": "",
        "PARALLELISM_CONFIG_EP_LAYERS_KEEP": "",
        "PARALLELISM_CONFIG_EP_FP8_RECIPE": "auto",
        "PARALLELISM_CONFIG_EP_LOSS": "auto",
        "PARALLELISM_CONFIG_EP_CHECKPOINT_FORMAT": "hf",
        "PARALLELISM_CONFIG_EP_ASYNC_SAVE": "False",
        "PARALLELISM_CONFIG_EP_BALANCE_AUX_LOSS": "global",
        "PARALLELISM_CONFIG_EP_BALANCE_BIAS_RATE": "0.0",
        "PARALLELISM_CONFIG_EP_Z_LOSS": "0.0",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "-1",
        "FSDP_VERSION": "2",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "ACCELERATE_USE_CPU": "true",
    }


def test_command_line_overrides_yaml(launcher, write_yaml):
    config = write_yaml({"parallelism_config_ep_size": 2, "parallelism_config_dp_shard_size": 4})
    options = ["--num_processes=8", "--parallelism-config-ep-size=4", "--parallelism_config_dp_replicate_size", "2"]
    _, environment = launcher.workers("--config_file", config, *options, "train.py")
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == "4"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"


def test_keys_without_prefix_mean_the_same(launcher, write_yaml):
    _, environment = launcher.workers("--config", write_yaml({"ep_size": 2, "dp_shard_size": 4}), "train.py")
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"


def test_command_line_alone_implies_fsdp2(launcher):
    kind, environment = launcher.workers("--num_processes", 2, "--parallelism_config_ep_size", 2, "train.py")
    assert kind == "distributed"
    assert environment["ACCELERATE_USE_FSDP"] == environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"


def test_what_was_said_about_fsdp_stays(launcher, write_yaml):
    config = write_yaml({"ep_size": 2}, {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_reshard_after_forward": False})
    options = ["--fsdp_state_dict_type", "FULL_STATE_DICT"]
    _, environment = launcher.workers("--config", config, *options, "train.py")
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"


@pytest.mark.parametrize("kind", ["NO", "FSDP"])
def test_the_users_default_file_may_lie_around(launcher, write_yaml, kind):
    launcher.set_default_file(write_yaml(distributed_type=kind, num_processes=1, mixed_precision="bf16"))
    _, environment = launcher.workers("--num_processes", 2, "--parallelism_config_ep_size", 2, "train.py")
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == "2"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_with_accelerators_the_workers_use_them_unless_told_otherwise(launcher, write_yaml):
    launcher.set_accelerators(4)
    _, environment = launcher.workers("--parallelism_config_ep_size", 4, "train.py")
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == "4"
    assert "ACCELERATE_USE_CPU" not in environment
    _, environment = launcher.workers("--config", write_yaml({"ep_size": 2}, use_cpu=True), "train.py")
    assert environment["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("parallelism", [None, {"parallelism_config_dp_shard_size": 4, "unknown": 1}])
def test_yaml_without_ep_key_is_left_alone(launcher, write_yaml, parallelism):
    _, environment = launcher.workers("--config", write_yaml(parallelism), "train.py")
    assert not [name for name in environment if "_EP_" in name]
    assert "ACCELERATE_USE_CPU" not in environment
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def test_nothing_of_a_launch_stays_behind(launcher, write_yaml):
    launcher.workers("--config", write_yaml({"ep_size": 2}), "train.py")
    assert not [name for name in os.environ if name.startswith("PARALLELISM_CONFIG_EP")]


# What is refused.


@pytest.mark.parametrize(
    ("parallelism", "fsdp", "changes", "message"),
    [
        ({"parallelism_config_ep_sise": 2}, {}, {}, "did you mean `parallelism_config_ep_size`"),
        (
            {"ep_size": 2, "parallelism_config_dp_shards_size": 4},
            {},
            {},
            "did you mean `parallelism_config_dp_shard_size`",
        ),
        ({"expert_parallel_size": 2}, {}, {}, "`expert_parallel_size` in parallelism_config is not a known key"),
        ({"ep_size": "two"}, {}, {}, "parallelism_config_ep_size must be an integer, but is 'two'"),
        ({"ep_size": 1.5}, {}, {}, "must be an integer"),
        ({"ep_size": 0}, {}, {}, "ep_size must be an integer of at least 1"),
        ({"ep_size": 3}, {}, {}, "choose an ep_size among 1, 2, 4"),
        ({"ep_size": 2, "dp_shard_size": 2}, {}, {}, "is 2, but 4 processes were started"),
        ({"ep_size": 2, "ep_dispatcher": "pigeon"}, {}, {}, "ep_dispatcher 'pigeon' is unknown"),
        ({"ep_size": 2, "ep_compute": "abacus"}, {}, {}, "ep_compute 'abacus' is unknown"),
        ({"ep_size": 2}, {"fsdp_version": 1}, {}, "set `fsdp_version: 2`"),
        ({"ep_size": 2}, {"fsdp_cpu_ram_efficient_loading": True}, {}, "set `fsdp_cpu_ram_efficient_loading: false`"),
        ({"ep_size": 2}, {}, {"distributed_type": "MULTI_GPU"}, "set `distributed_type: FSDP`"),
        ({"ep_size": 2}, {}, {"distributed_type": "DEEPSPEED"}, "set `distributed_type: FSDP`"),
        ({"ep_size": 2}, {}, {"num_processes": -1}, "pass --num_processes"),
    ],
)
def test_refused_in_yaml(launcher, write_yaml, capsys, parallelism, fsdp, changes, message):
    with pytest.raises(SystemExit) as ended:
        launcher.workers("--config", write_yaml(parallelism, fsdp, **changes), "train.py")
    assert ended.value.code == CONFIG_EXIT_CODE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("expertmesh: ")
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallelism_config_ep_size=two"], "parallelism_config_ep_size must be an integer, but is 'two'"),
        (["--parallelism_config_ep_size=3"], "choose an ep_size among 1, 2, 4"),
        (["--fsdp_version=1"], "set `fsdp_version: 2`"),
        (["--fsdp_cpu_ram_efficient_loading=true"], "set `fsdp_cpu_ram_efficient_loading: false`"),
        (["--multi_gpu"], "--multi_gpu cannot be combined with expert parallelism"),
        (["--use_deepspeed"], "--use_deepspeed cannot be combined with expert parallelism"),
        (["--cpu"], "--cpu starts one process"),
    ],
)
def test_refused_on_the_command_line(launcher, write_yaml, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        launcher.workers("--config", write_yaml({"ep_size": 2}), *options, "train.py")
    assert ended.value.code == CONFIG_EXIT_CODE
    assert message in capsys.readouterr().err


def test_an_unknown_number_of_processes_is_refused(launcher, capsys):
    with pytest.raises(SystemExit):
        launcher.workers("--parallelism_config_ep_size", 2, "train.py")
    assert "pass --num_processes" in capsys.readouterr().err
