"""The README's example of another package's dispatcher, built as a package, installed, and trained with."""

from __future__ import annotations

import json
import re
import sys

import pytest
from processes import ROOT, TESTS, run_command, run_ranks

EXACT = {"loss": 1e-5, "gradient": 1e-5, "norm": 1e-5, "parameter": 1e-5}
DOCTOR = "from expertmesh.doctor import dispatchers; print(*dispatchers(), sep=chr(10))"
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "all-gather-dispatcher"
version = "0.1"

"""


def code_blocks(language: str) -> list[str]:
    """What the README's section on dispatchers shows in a language."""
    readme = (ROOT / "README.md").read_text()
    (section,) = re.findall(r"^## Dispatchers\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages with nothing in it but the README's."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (module,), (entry_point,) = code_blocks("python"), code_blocks("toml")
    (source / "all_gather_dispatcher.py").write_text(module)
    (source / "pyproject.toml").write_text(PROJECT + entry_point)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    installed = run_command((*pip, "--target", target, source), timeout=120)
    assert installed.returncode == 0, installed.output
    return target


def test_the_example_is_short():
    lines = [line for block in (*code_blocks("python"), *code_blocks("toml")) for line in block.splitlines()]
    assert len([line for line in lines if line.strip()]) <= 30


def test_the_example_trains_like_one_process(site):
    program = TESTS / "ranks" / "third_party_dispatcher.py"
    rank_0, *_ = run_ranks(program, 2, "all_gather", env={"PYTHONPATH": str(site)}, timeout=240)
    results = json.loads(rank_0.stdout.splitlines()[-1])
    beyond = {
        f"{case} {what}": error
        for case, errors in results.items()
        for what, error in errors.items()
        if not error <= EXACT[what]
    }
    assert len(results) == 5 and not beyond


def test_doctor_knows_it(site):
    finished = run_command([sys.executable, "-c", DOCTOR], env={"PYTHONPATH": str(site)}, timeout=60)
    assert "\nok   dispatcher all_gather  usable by name; `auto` does not consider it\n" in finished.stdout, (
        finished.output
    )
