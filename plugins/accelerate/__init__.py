"""Expert parallelism as an Accelerate plugin.

`parallelism.ExpertMeshConfig` is the only object Accelerate has to be given; `launcher` and `autoload` give it to
scripts that never heard of us. This file stays empty of imports: it is loaded while `import torch` is still running.
"""

from typing import Any

__all__ = ["ExpertMeshConfig"]


def __getattr__(name: str) -> Any:
    if name != "ExpertMeshConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from expertmesh_plugins.accelerate.parallelism import ExpertMeshConfig

    return ExpertMeshConfig
