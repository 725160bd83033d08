"""Expert parallelism for Hugging Face mixture-of-experts models.

Nothing is imported before it is asked for: this file is loaded while `import torch` is still running.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ExpertMeshConfig", "ExpertParallelConfig", "parallelize"]


def __getattr__(name: str) -> Any:
    if name == "ExpertMeshConfig":
        from expertmesh.plugins import load_plugin

        return load_plugin("accelerate").ExpertMeshConfig
    if name == "ExpertParallelConfig":
        from expertmesh.config import ExpertParallelConfig

        return ExpertParallelConfig
    if name == "parallelize":
        from expertmesh.composition import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
