"""The entry point that PyTorch calls at the end of every `import torch`: how an untouched script comes to see EP.

`activate` does nothing unless this process is Accelerate's launcher, or a worker that such a launcher gave an expert
parallel (EP) size. It then only waits: a module of Accelerate is patched right after it was executed, because while
`import torch` runs Accelerate is at best half imported. `EXPERTMESH_AUTOLOAD=0` switches all of it off.

Monkey-patches made from here, checked on accelerate 1.15.0:

- launcher: see `launcher`, the only other module that patches anything.
- worker: `accelerate.parallelism_config.ParallelismConfig.__new__`. Constructing the class, by whichever name a script,
  Accelerate or Transformers imported it, gives an `ExpertMeshConfig`, which is a subclass. The class itself stays the
  one that everybody checks instances against; a script's own subclass of it stays what it is, without EP.
- worker: what the adapter of Transformers changes in `transformers.modeling_utils`, see its `deferred_load`.

What changes in Accelerate's and Transformers' checkpoints is patched when an accelerator gets an `ExpertMeshConfig`.

Nothing but the standard library is imported before it is needed: every user of PyTorch pays for this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

LAUNCHER_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")


def activate() -> None:
    """Prepare a launcher or a worker for EP. Never raises: a broken hook must not break `import torch`."""
    _harmlessly(_activate)


def _activate() -> None:
    if os.environ.get("EXPERTMESH_AUTOLOAD") == "0":
        return
    if _is_launcher():
        from expertmesh.after_import import AfterImport

        sys.meta_path.insert(0, AfterImport("accelerate.commands.utils", _teach_launcher))
    elif "PARALLELISM_CONFIG_EP_SIZE" in os.environ:
        from expertmesh.after_import import AfterImport
        from expertmesh.errors import install_one_line_reports

        install_one_line_reports()
        sys.meta_path.insert(0, AfterImport("accelerate.parallelism_config", _construct_expert_mesh_configs))
        sys.meta_path.insert(0, AfterImport("transformers.modeling_utils", _defer_loading))


def _is_launcher() -> bool:
    """Whether this is `accelerate launch`, `accelerate-launch`, or one of their modules run by `python -m`."""
    argv = getattr(sys, "argv", None) or [""]  # An embedded interpreter may have none.
    if argv[0] == "-m":
        # Python is still importing the packages around the module; its name is only in the original command line.
        module = sys.orig_argv[-len(argv)].removeprefix("-m")
        return module == LAUNCHER_MODULES[0] or (module == LAUNCHER_MODULES[1] and argv[1:2] == ["launch"])
    program = os.path.splitext(os.path.basename(argv[0]))[0]
    return program == "accelerate-launch" or (program == "accelerate" and argv[1:2] == ["launch"])


def _teach_launcher(commands_utils: ModuleType) -> None:
    from expertmesh_plugins.accelerate.launcher import patch_launch_parser

    patch_launch_parser(commands_utils.CustomArgumentParser)


def _construct_expert_mesh_configs(parallelism_config: ModuleType) -> None:
    plain = parallelism_config.ParallelismConfig

    def construct(cls: type, *_: Any, **__: Any) -> Any:
        if cls is plain:
            # Not before somebody constructs one: the module needs all of Accelerate, which is half imported by now.
            from expertmesh_plugins.accelerate.parallelism import ExpertMeshConfig

            cls = ExpertMeshConfig
        return object.__new__(cls)

    plain.__new__ = staticmethod(construct)


def _defer_loading(modeling_utils: ModuleType) -> None:
    """Let Transformers' adapter in when the first weights are about to be loaded, not while all is half imported."""
    model_class = modeling_utils.PreTrainedModel
    original = model_class._load_pretrained_model

    def load(*args: Any, **kwargs: Any) -> Any:
        model_class._load_pretrained_model = staticmethod(original)
        _harmlessly(lambda: _install_deferred_load(modeling_utils))
        return model_class._load_pretrained_model(*args, **kwargs)

    model_class._load_pretrained_model = staticmethod(load)


def _install_deferred_load(modeling_utils: ModuleType) -> None:
    from importlib import import_module

    from expertmesh.plugins import load_plugin

    import_module(f"{load_plugin('transformers').__name__}.deferred_load").install(modeling_utils)


def _harmlessly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        print(
            f"expertmesh: expert parallelism is not available, its import hook failed ({type(error).__name__}: "
            f"{error}): reinstall expertmesh, or set EXPERTMESH_AUTOLOAD=0 to silence this.",
            file=sys.stderr,
        )
