"""Installed packages that offer a dispatcher, and fail in every way in which DeepEP's and Transformer Engine's do."""

from __future__ import annotations

from pathlib import Path

WORKS = """
from expertmesh.dispatch.all_to_all import AllToAll

class Engine(AllToAll):
    pass
"""
FAILURES = {
    "ImportError": "raise ImportError('libtransport.so: cannot open shared object file')",
    "ModuleNotFoundError": "import a_module_that_is_not_there",
    "AssertionError": "assert False, 'the loaded libnccl is another one'",
    "RuntimeError": "raise RuntimeError('Found empty meta package')",
    "FileNotFoundError": "open('/nowhere/libtransport.so')",
    "OSError": "raise OSError('undefined symbol: cublasLt')",
    "SyntaxError": "this is no Python",
}


def install(site: Path, name: str, source: str, package: str = "") -> None:
    """Write an installed package with one module and an entry point for the dispatcher `name`."""
    package = package or f"{name}_package"
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (site / f"{package}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[expertmesh.dispatchers]\n{name} = {package}:Engine\n")


def only_on_rank_1(source: str) -> str:
    """Source that fails as given on rank 1 and works elsewhere."""
    return f"import os\nif os.environ.get('RANK') == '1':\n    {source}\n{WORKS}"
