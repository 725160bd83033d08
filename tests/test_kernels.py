"""The Triton kernels: interpreted where there is no GPU, and compiled for one everywhere.

Experts as a whole against `loop` in float32, 1e-5 relative as in `test_compute.py`; single kernels in bfloat16 within
one unit in the last place of what float64 gives (the interpreter cuts off where a GPU rounds).
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from processes import TESTS, run_command

pytest.importorskip("triton", reason="triton, a dev extra, is not installed")


def program(name: str, **env: str) -> str:
    search = {"PYTHONPATH": f"{TESTS}:{TESTS / 'ranks'}"}
    return run_command([sys.executable, TESTS / "ranks" / name], env=search | env).stdout


@pytest.fixture(scope="module")
def errors():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return json.loads(program("triton_experts.py", **interpreted).splitlines()[-1])


def test_experts_are_those_of_loop(errors):
    of_experts = {name: error for name, error in errors.items() if name.startswith(("qwen3_moe", "mixtral"))}
    assert len(of_experts) == 12
    assert max(of_experts.values()) <= 1e-5, of_experts


def test_no_tokens_give_zeros(errors):
    assert errors["nothing"] == 0


@pytest.mark.parametrize("what", ["activation", "gradient of the projection", "weighted activation", "total"])
@pytest.mark.parametrize("width", [8, 24, 2500])
def test_a_kernel_rounds_once(errors, what, width):
    assert errors[f"{what} {width}"] <= 1


@pytest.mark.parametrize("width", [8, 24, 2500])
def test_the_gradient_of_the_routing_weights_is_summed_in_float32(errors, width):
    assert errors[f"gradient of the weights {width}"] <= 1


def test_every_kernel_compiles_to_machine_code_of_a_gpu(tmp_path):
    lines = program("triton_compiled.py", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert lines == ["gated True", "gated_backward True", "slots_of_rows True", "sum_of_rows True"]
