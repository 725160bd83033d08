"""What `gpu_check.sh` runs: a line a check. Add yours here.

A check is a command that is run in the repository's root. It passes if it exits with 0, and it is skipped if it exits
with 77 (its last line is the reason), if it is pytest and every test was skipped, or if the machine has too few GPUs.
`{python}` stands for the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("all_to_all", "deepep", "deepep_expanded", "hybridep", "te_ep")
# Test files with snapshots of an engine's interface, and what a differing one means.
SNAPSHOTS = {
    "DeepEP": ("tests/test_engines.py", "plugins/deepep"),
    "HybridEP": ("tests/test_engine_hybridep.py", "plugins/deepep"),
    "TE-EP": ("tests/test_engine_te_ep.py", "plugins/transformer_engine"),
}


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: unique.
        command: the words of a command.
        remedy: what to do if it fails.
        timeout: seconds after which it is ended, with everything that it started.
        gpus: how many it needs.
    """

    name: str
    command: tuple[str, ...]
    remedy: str
    timeout: float = 600
    gpus: int = 1


def _python(*words: object) -> tuple[str, ...]:
    return ("{python}", *map(str, words))


def _pytest(*words: str) -> tuple[str, ...]:
    return _python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *words)


CHECKS: tuple[Check, ...] = (
    Check(
        "doctor",
        _python("-m", "expertmesh.cli", "doctor"),
        "expertmesh is not installed in this environment: `pip install -e .`.",
        timeout=120,
    ),
    *(
        Check(
            f"snapshot {engine}",
            _pytest(file, "-k", "installed_engine"),
            f"the installed engine is called differently: compare it with tests/emulation/snapshots, and mend {plugin} "
            f"and its emulation.",
            timeout=300,
        )
        for engine, (file, plugin) in SNAPSHOTS.items()
    ),
    *(
        Check(
            f"parity {engine}, {ranks} ranks",
            _python("benchmarks/layer_parity.py", "--dispatcher", engine, "--ranks", ranks),
            f"set ep_dispatcher to another than {engine} on such machines, and compare the real engine with what its "
            f"emulation enforces.",
            gpus=ranks,
        )
        for engine in ENGINES
        for ranks in (2, 4, 8)
    ),
    Check(
        "dispatch, time and kernels",
        _python("benchmarks/dispatch.py", "--tables", "time", "--hidden", 2048, "--experts", 128, "--tokens", 4096),
        "the dispatchers that fail parity are the first to look at.",
        timeout=900,
        gpus=2,
    ),
    Check(
        "kernels",
        _pytest("tests/test_kernels.py"),
        "leave ep_compute at auto, and compare the kernels on the GPU with what the interpreter makes of them.",
        timeout=600,
        gpus=1,
    ),
    Check(
        "dispatch, counts",
        _python("benchmarks/dispatch.py", "--tables", "counts"),
        "it needs no GPU: run it by itself, and tests/test_benchmark_dispatch.py.",
    ),
)
