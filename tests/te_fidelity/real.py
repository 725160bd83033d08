"""Transformer Engine's own Python on a machine without a GPU: its binary and the packages it does without are stubs.

Only what needs no kernel can be asked: signatures, parameters, states, hooks. Checked on 2.20.2.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.metadata
import os
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

VERSION = "2.20.2"
_BINARY = "transformer_engine_torch"
_DISPENSABLE = ("einops", "onnx", "onnxscript", "onnxscript.onnx_opset")


class _Member:
    """A value of whatever kind, with whatever members."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def __call__(self, *arguments: object, **options: object) -> _Member:
        return self

    def __getattr__(self, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member()

    def __int__(self) -> int:
        return 0


class _Named(type):
    """A function, or a class or an enumeration whose members are made as they are asked for."""

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, member := _Member())
        return member


class _Stub(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := _Named(name, (_Member,), {}))
        return made


def install(folder: Path) -> None:
    """Make `import transformer_engine` find the wheel that is unpacked in a folder."""
    # Set while the package itself is built: shared objects are not looked for then.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    warnings.simplefilter("ignore")
    for name in (*_DISPENSABLE, _BINARY):
        sys.modules[name] = _Stub(name)
    sys.modules["pydantic"] = _Stub("pydantic")
    sys.modules["pydantic.dataclasses"] = dataclasses
    sources = folder / "transformer_engine" / "pytorch"
    binary = sys.modules[_BINARY]
    binary.DType = _enumeration(sources / "constants.py", "DType")
    backends = _enumeration(sources / "cpp_extensions" / "fused_attn.py", "FusedAttnBackend")
    binary.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {f"NVTE_{name}": value for name, value in backends.__members__.items()}
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    torch.cuda.current_device = lambda: 0
    version_of = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name.startswith("transformer") else version_of(name)
    sys.path.insert(0, str(folder))
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None


def _enumeration(source: Path, name: str) -> type[enum.IntEnum]:
    """An enumeration with the members that a class of the sources has."""
    (found,) = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    members = [node.targets[0].id for node in found.body if isinstance(node, ast.Assign)]
    return enum.IntEnum(name, {member: value for value, member in enumerate(members)})
