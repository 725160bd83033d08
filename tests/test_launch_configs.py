"""Every file in launch_configs/ that is for `accelerate launch --config`, taken through Accelerate's own parser.

Recipes for `expertmesh.finetune` lie there too; test_finetune_recipe.py reads them all.
"""

from __future__ import annotations

import pytest
from launching import Launcher
from processes import ROOT

FOLDER = ROOT / "launch_configs"

# num_processes and what else the workers are told: dp_replicate, dp_shard, ep, mixed precision, on CPU.
EXPECTED = {
    "ep2_cpu": (2, "1", "-1", "2", "no", True),
    "ep4_cpu": (4, "1", "-1", "4", "no", True),
    "ep8": (8, "1", "8", "8", "bf16", False),
    "ep8_hsdp_2x8": (16, "2", "8", "8", "bf16", False),
    "ep64_128gpu": (128, "1", "128", "64", "bf16", False),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_launches_as_its_name_says(name, monkeypatch):
    num_processes, dp_replicate, dp_shard, ep, mixed_precision, on_cpu = EXPECTED[name]
    launcher = Launcher(monkeypatch)
    launcher.set_accelerators(8)
    kind, environment = launcher.workers("--config", FOLDER / f"{name}.yaml", "train.py")
    assert kind == "distributed"
    assert launcher.num_processes == num_processes
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == dp_replicate
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == dp_shard
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == ep
    assert environment["ACCELERATE_MIXED_PRECISION"] == mixed_precision
    assert environment.get("ACCELERATE_USE_CPU") == ("true" if on_cpu else None)
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    # On one node rank 0 can hold the whole model.
    whole = num_processes <= 8
    assert environment["FSDP_STATE_DICT_TYPE"] == ("FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT")
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@pytest.mark.parametrize("name", ["ep2_cpu", "ep4_cpu"])
def test_sizes_can_be_overridden(name, monkeypatch):
    options = ["--num_processes", 8, "--parallelism_config_ep_size", 8]
    _, environment = Launcher(monkeypatch).workers("--config", FOLDER / f"{name}.yaml", *options, "train.py")
    assert environment["PARALLELISM_CONFIG_EP_SIZE"] == "8"


@pytest.mark.parametrize("name", [*EXPECTED, "lora_ep8", "full_ep8"])
def test_every_key_has_a_comment(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    keys = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in keys if "#" not in line] == (
        ["fsdp_config:", "parallelism_config:"] if name in EXPECTED else []
    )
