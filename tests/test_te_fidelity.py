"""The emulation of Transformer Engine against its own Python: of the wheel of 2.20.2, which is fetched once.

The wheel has no binary. What can be asked without one is asked in processes of their own, with stubs in its place.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from emulation.signatures import snapshot
from processes import TESTS, run_command
from te_fidelity.real import VERSION

SAID = snapshot(f"te_{VERSION}")
WHEEL = f"transformer_engine-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel(request) -> Path:
    """The folder with the unpacked wheel, from pytest's cache if it has been there before."""
    folder = request.config.cache.mkdir("transformer_engine")
    archive = folder / WHEEL
    if not archive.exists():
        options = ("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--dest", folder)
        fetched = run_command([sys.executable, "-m", "pip", "download", *options, f"transformer-engine=={VERSION}"])
        if fetched.returncode:
            pytest.skip(f"the wheel cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}")
    assert SAID["sha"].endswith(hashlib.sha256(archive.read_bytes()).hexdigest())
    unpacked = folder / VERSION
    with zipfile.ZipFile(archive) as content:
        content.extractall(unpacked)
    return unpacked


def program(name: str, wheel: Path, **env: str) -> str:
    """What a program says of the real one."""
    finished = run_command(
        [sys.executable, TESTS / "te_fidelity" / name, wheel], env={"PYTHONPATH": str(TESTS), **env}, timeout=120
    )
    assert finished.returncode == 0, finished.output
    return finished.stdout.splitlines()[-1]


def test_the_real_one_is_as_the_snapshot_says(wheel):
    found = json.loads(program("facts.py", wheel))
    for kind in ("signatures", "facts"):
        assert found[kind] == SAID[kind]


def test_its_own_kernels_permute_as_the_emulation_does(wheel):
    pytest.importorskip("triton", reason="triton, which interprets its kernels, is not installed")
    assert program("kernels.py", wheel, TRITON_INTERPRET="1") == "[]"


def test_experts_are_computed_as_by_loop_on_its_own_python(wheel):
    errors = json.loads(program("experts.py", wheel))
    # Output, tokens, weights, two projections; with biases and with adapters two and four more.
    assert len(errors) == 5 + 7 + 9 + 11
    assert max(errors) <= 1e-5


def test_its_own_attention_computes_what_the_emulations_does(wheel):
    errors = json.loads(program("attention.py", wheel, NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0"))
    assert len(errors) == 16
    assert max(errors.values()) <= 1e-6


def test_its_own_linear_takes_parameters_over(wheel):
    errors = json.loads(program("linear.py", wheel))
    # Output and input; weight and bias where they are trained.
    assert len(errors) == 4 + 2 + 3 + 2
    assert max(errors) <= 1e-6


def test_our_attention_is_computed_by_its_own(wheel):
    errors = json.loads(program("attending.py", wheel, NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0"))
    assert len(errors) == 12
    assert max(errors.values()) <= 1e-6


def test_our_layers_are_its_own(wheel):
    found = json.loads(program("layers.py", wheel))
    assert len(found["errors"]) == 4 + 3
    assert max(found["errors"]) <= 1e-6
    assert found["keys"] == [["weight", "bias"], ["weight"], ["weight"]]
    assert found["same"] and found["same norm"] and found["is linear"]
    assert found["norm"] == [1e-3, True]
    assert set(found["loads"] + found["gives"]) == {"<All keys matched successfully>"}
    assert found["text"] == "Linear(in_features=32, out_features=24, bias=False)"
