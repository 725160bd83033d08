"""Optimizer state that any mesh can resume: DCP of `{"optimizer": {"state": ..., "param_groups": ...}}` by name.

This is the structure Accelerate's FSDP2 writes into `optimizer_0`, so either side reads what the other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from expertmesh.adapters import AdapterParameter, find_adapters
from expertmesh.checkpoint.agree import agreed
from expertmesh.checkpoint.dcp import SafeReader, Stage, few, load_flat, load_flat_alone, reshard
from expertmesh.errors import CheckpointError

OPTIMIZER_FOLDER = "optimizer"
ACCELERATE_FOLDER = "optimizer_0"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# How a step is computed on the hardware at hand, not what it computes.
_HARDWARE_OPTIONS = ("capturable", "differentiable", "foreach", "fused")


class OptimizerStage(Stage):
    """An optimizer's state on its way into a DCP folder. Nothing is initialized or changed: saving leaves no trace.

    Args:
        model: the model whose parameters the optimizer has.
        optimizer: of any class that keeps tensors or plain values for each parameter.
        copy: see `Stage`.

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, copy: bool) -> None:
        reshard(model)
        names = _names(model, optimizer)
        packed = optimizer.state_dict()
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
        layouts = _layouts(model)
        state = {
            names[index]: _by_expert(layouts.get(names[index]), values) for index, values in packed["state"].items()
        }
        super().__init__({"optimizer": {"state": state, "param_groups": groups}}, copy)


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path, group: ProcessGroup | None = None) -> None:
    """Load an optimizer's state from `folder/optimizer` (or Accelerate's `folder/optimizer_0`). Collective.

    Any number of processes may load what any other number wrote; each reads its own shards. A parameter that had no
    state when it was saved, because it had never had a gradient, has none afterwards.

    Args:
        model: the model whose parameters the optimizer has.
        optimizer: of the class that was saved, with the same parameters in each of its groups.
        folder: the checkpoint.
        group: the ranks that load; by default all.

    Raises:
        CheckpointError: the state is absent or damaged, or does not fit the optimizer (by parameter name); the same on
            every rank.
    """
    path = optimizer_folder(folder)
    reshard(model)
    names = _names(model, optimizer)
    _initialize(model, optimizer)
    with agreed(f"load the optimizer state from {path}", group):
        stored = _StoredOptimizer.read(path)
        groups = stored.match_groups(optimizer.state_dict()["param_groups"], names)
        layouts = _layouts(model)
        current = optimizer.state_dict()["state"]
        current = {index: _by_expert(layouts.get(names[index]), values) for index, values in current.items()}
        parameters = [
            layouts[name].by_expert(parameter.detach()) if name in layouts else parameter
            for name, parameter in zip(names, _parameters(optimizer), strict=True)
        ]
        wanted = stored.destinations(parameters, names, current)
    load_flat(wanted, path, group)
    state = {
        index: _back(layouts.get(name), {key: wanted[entry] for key, entry in stored.state[name].items()})
        for index, name in enumerate(names)
        if name in stored.state
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def optimizer_folder(folder: Path) -> Path:
    """Where a checkpoint keeps its optimizer state; the place expertmesh writes to if there is none."""
    ours, accelerate = Path(folder, OPTIMIZER_FOLDER), Path(folder, ACCELERATE_FOLDER)
    return accelerate if accelerate.is_dir() and not ours.is_dir() else ours


@dataclass(frozen=True)
class _StoredOptimizer:
    """What a DCP folder has.

    Attributes:
        path: the folder.
        metadata: of all its entries.
        state: for each parameter name the entry of each of its values (`exp_avg`, `step`, ...).
        groups: options and parameter names of each parameter group.
    """

    path: Path
    metadata: Metadata
    state: dict[str, dict[str, str]]
    groups: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> _StoredOptimizer:
        metadata = SafeReader(path).read_metadata()
        state: dict[str, dict[str, str]] = {}
        options: dict[str, tuple[int, str]] = {}
        for entry, place in metadata.planner_data.items():
            match place:
                case ("optimizer", "state", name, key):
                    state.setdefault(name, {})[key] = entry
                case ("optimizer", "param_groups", int(index), option):
                    options[entry] = (index, option)
                case _:
                    raise CheckpointError(f"{path} is no optimizer state that expertmesh can read: it has {entry}.")
        values = {entry: _empty(metadata, entry) for entry in options}
        load_flat_alone(values, path)
        groups: list[dict[str, Any]] = [{} for _ in range(1 + max((i for i, _ in options.values()), default=-1))]
        for entry, (index, option) in options.items():
            groups[index][option] = values[entry]
        return cls(path, metadata, state, groups)

    def match_groups(self, current: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
        """The optimizer's groups, their options as stored; refuses other parameters or another grouping."""
        known = {name for group in self.groups for name in group["params"]}
        problems = {
            "it has nothing for": set(names) - known,
            "this optimizer does not train": known - set(names),
        }
        lines = [f"{problem} {few(found)}" for problem, found in problems.items() if found]
        if lines:
            raise CheckpointError(f"{self.path} does not fit the optimizer: {'; '.join(lines)}.")
        rest = list(self.groups)
        matched = []
        for number, group in enumerate(current):
            members = {names[index] for index in group["params"]}
            stored = next((candidate for candidate in rest if set(candidate["params"]) == members), None)
            if stored is None:
                raise CheckpointError(
                    f"{self.path} does not fit the optimizer: its parameter group {number} ({few(members)}) had other "
                    f"parameters when it was saved. Build the optimizer as it was then."
                )
            rest.remove(stored)
            kept = {option: group[option] for option in ("params", *_HARDWARE_OPTIONS) if option in group}
            matched.append({**group, **stored, **kept})
        return matched

    def destinations(
        self, parameters: Sequence[Tensor], names: Sequence[str], state: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What to load the state of each parameter into, by entry; refuses values of other names or shapes."""
        wanted = {}
        problems: dict[str, list[str]] = {}
        for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            stored, current = self.state.get(name, {}), state.get(index, {})
            if stored and current and stored.keys() != current.keys():
                problems.setdefault(f"{few(stored)} instead of {few(current)}", []).append(name)
                continue
            for key, entry in stored.items():
                wanted[entry] = self._destination(entry, current.get(key), parameter)
                if isinstance(wanted[entry], Tensor) and wanted[entry].shape != self._shape(entry):
                    problems.setdefault(f"{key} of another shape", []).append(name)
        if problems:
            lines = [f"it has {problem} for {few(found)}" for problem, found in problems.items()]
            raise CheckpointError(f"{self.path} does not fit the optimizer: {'; '.join(lines)}.")
        return wanted

    def _destination(self, entry: str, current: object, parameter: Tensor) -> Tensor | None:
        stored = self.metadata.state_dict_metadata[entry]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if isinstance(current, Tensor):
            return current
        if stored.size == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=stored.properties.dtype)
        return _empty(self.metadata, entry)

    def _shape(self, entry: str) -> torch.Size:
        return self.metadata.state_dict_metadata[entry].size


def _layouts(model: nn.Module) -> dict[str, AdapterParameter]:
    """Adapters of experts that are not sharded, by name; their state is stored as sharded ones', experts outermost."""
    named = {parameter: name for name, parameter in _named_parameters(model)}
    unsharded = {}
    for adapters in find_adapters(model).values():
        for parameter in adapters.parameters:
            tensor = getattr(parameter.owner, parameter.name)
            if not isinstance(tensor, DTensor):
                unsharded[named[tensor]] = parameter
    return unsharded


def _by_expert(layout: AdapterParameter | None, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _moved(layout and layout.by_expert, value) for key, value in values.items()}


def _back(layout: AdapterParameter | None, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _moved(layout and layout.back, value) for key, value in values.items()}


def _moved(move: Callable[[Tensor], Tensor] | None, value: Any) -> Any:
    # A number of steps has no dimensions to move.
    if move is None or not isinstance(value, Tensor) or value.ndim < 2:
        return value
    return move(value).contiguous()


def _empty(metadata: Metadata, entry: str) -> Tensor | None:
    stored = metadata.state_dict_metadata[entry]
    if not isinstance(stored, TensorStorageMetadata):
        return None
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order of its state dict's indices."""
    named = {parameter: name for name, parameter in _named_parameters(model)}
    parameters = _parameters(optimizer)
    foreign = sum(parameter not in named for parameter in parameters)
    if foreign:
        raise CheckpointError(
            f"{foreign} of the optimizer's {len(parameters)} parameters are not the model's: build the optimizer from "
            f"the parameters of the prepared model."
        )
    return [named[parameter] for parameter in parameters]


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def _initialize(model: nn.Module, optimizer: Optimizer) -> None:
    """Let an optimizer that has not stepped yet create its state, whose values are about to be replaced.

    torch does so by a step with zero gradients and a learning rate of zero, and not at all while there are gradients.
    """
    if optimizer.state:
        return
    gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
    for parameter, _ in gradients:
        parameter.grad = None
    get_optimizer_state_dict(model, optimizer)
    for parameter, gradient in gradients:
        parameter.grad = gradient
