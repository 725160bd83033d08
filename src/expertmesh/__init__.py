"""Expert parallelism for Hugging Face mixture-of-experts models.

Nothing is imported before it is asked for: this file is loaded while `import torch` is still running. Transformers' own
expert parallelism is offered our dispatchers as soon as it is imported.
"""

from types import ModuleType
from typing import Any

from expertmesh.after_import import after_import

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


def _offer_dispatchers(expert_parallel: ModuleType) -> None:
    from importlib import import_module

    from expertmesh.plugins import load_plugin

    import_module(f"{load_plugin('transformers').__name__}.ep_implementation").register(expert_parallel)


after_import("transformers.distributed.expert_parallel", _offer_dispatchers)
