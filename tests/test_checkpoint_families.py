"""Models of every kind: saved by four ranks as by one process, loaded by stock Transformers, and by other meshes.

The ranks run all cases in one go (`ranks/checkpoint_families.py`); each test here looks at what they found in one:
whether the files have the bytes of `save_pretrained`, and whether other ranks, spread in another way, then hold those
weights bit by bit, read from files with one tensor an expert and from files with the model's own names.
"""

from __future__ import annotations

import json
import sys

import pytest
from processes import TESTS, run_command, run_ranks
from ranks.checkpoint_families import (
    CASES,
    CONCATENATED,
    DTYPES_AND_TIES,
    FEW_EXPERTS,
    LAYOUTS,
    SPLIT,
    TRANSPOSED,
    stored,
)

WITHOUT_EXPERTMESH = {"EXPERTMESH_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# Its class is not Transformers'.
OWN_CODE = "buffers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder a case, as the ranks left it."""
    folder = tmp_path_factory.mktemp("families")
    program = TESTS / "ranks" / "checkpoint_families.py"
    run_ranks(program, 4, folder, *CASES, env={"PYTHONPATH": str(TESTS)}, timeout=500)
    return folder


def problems(folder, case):
    return json.loads((folder / case / "problems.json").read_text())


@pytest.mark.parametrize("case", CONCATENATED)
def test_concatenated_rows_keep_their_places(folder, case):
    """Transformers cuts the parts among the ranks before it concatenates them: rows end up elsewhere, silently."""
    assert problems(folder, case) == []


@pytest.mark.parametrize("case", SPLIT)
def test_split_rows_keep_their_places(folder, case):
    """Transformers cuts the tensor among the ranks before it splits it: it raises, or rows end up elsewhere."""
    assert problems(folder, case) == []


@pytest.mark.parametrize("case", TRANSPOSED)
def test_experts_are_transposed_only_where_the_file_has_them_so(folder, case):
    """Transformers compares one rank's part with the whole shape, and so transposes what it saved itself."""
    assert problems(folder, case) == []


@pytest.mark.parametrize("case", FEW_EXPERTS)
def test_a_rank_may_own_no_expert(folder, case):
    """Transformers raises on that rank alone, and the others wait for it."""
    assert problems(folder, case) == []


@pytest.mark.parametrize("case", [*LAYOUTS, *DTYPES_AND_TIES])
def test_every_layout_and_dtype(folder, case):
    assert problems(folder, case) == []


def test_tied_weights_are_stored_once_and_scratch_buffers_never(folder):
    assert "lm_head.weight" in stored(folder / "qwen3_moe" / "ours")
    assert "lm_head.weight" not in stored(folder / "tied" / "ours")
    assert {"flags", "counts", "steps"} < stored(folder / "buffers" / "ours").keys()
    assert "scratch" not in stored(folder / "buffers" / "ours")


def test_transformers_alone_loads_every_folder(folder):
    folders = [folder / case for case in CASES if case != OWN_CODE]
    program = TESTS / "scripts" / "stock_load.py"
    loaded = run_command([sys.executable, program, *folders], env=WITHOUT_EXPERTMESH, timeout=300)
    assert loaded.returncode == 0, loaded.output
    assert json.loads(loaded.stdout.splitlines()[-1]) == {case.name: [] for case in folders}
