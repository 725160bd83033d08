"""Counting what one call of a layer makes a device do, without a device.

Counted are the calls of operators that reach PyTorch's dispatcher below autograd, as a `TorchDispatchMode` sees them.
It sees nothing inside of the operators in `expertmesh.dispatch.ops`: whoever counts calls `Counter.inside` for the
methods that these call.

- A *launched op* is such a call, unless it is a view (all that it returns shares memory with its arguments), an
  allocation, a wait for a collective, or has nothing to do (all it returns is empty). A grouped GEMM counts one, a
  collective counts one, and so does an operator that needs several kernels, like a sort.
- A *host sync* is what makes the host wait for the device: reading a value, an operator whose result's size is in its
  values, and a tensor made of host values on a device.
- *Bytes sent* are those that collectives send to other ranks.
- *Memory* is that of storages that operators made. What operators use inside is not seen.

What an engine does is not looked into: `Counter.engine_call` takes what is known of it instead.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

ALLOCATIONS = frozenset(
    (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided)
)
# Operators that change what is known of a tensor and not what is in it.
NO_WORK = (
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "aten::detach_",
)
# Operators that must know values before they can return.
READING_OPS = frozenset(
    (
        aten._local_scalar_dense,
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten.bincount,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
    )
)
# Methods that read values without calling an operator where tensors are on the host.
READING_METHODS = ("tolist", "numpy", "cpu")
MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class EngineCall:
    """What an engine does in one call, as far as it is known.

    Attributes:
        launches: kernels and copies.
        syncs: times that the host waits.
        sent_bytes: to other ranks.
    """

    launches: int
    syncs: int
    sent_bytes: int


@dataclass(frozen=True)
class Counts:
    """What was counted.

    Attributes:
        launched: how often each operator was launched; calls of an engine are its names.
        syncs: what made the host wait, and where.
        sent_bytes: to other ranks.
        kept_bytes: memory that was still in use at the mark.
        peak_bytes: the most memory that was in use at once.
    """

    launched: dict[str, int]
    syncs: list[str]
    sent_bytes: int
    kept_bytes: int
    peak_bytes: int

    @property
    def launches(self) -> int:
        return sum(self.launched.values())


@dataclass
class Memory:
    """The storages that were made, in time.

    Attributes:
        changes: (which storage, bytes more or less), in order.
        mark: how many changes there were when it was set.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    mark: int = 0
    _alive: dict[int, int] = field(default_factory=dict)

    def made(self, tensor: Tensor) -> None:
        """Note the storage of a tensor, if it is a new one."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        number = len(self.changes)
        self._alive[storage._cdata] = number
        self.changes.append((number, storage.nbytes()))
        weakref.finalize(storage, self._freed, storage._cdata, number, storage.nbytes()).atexit = False

    def number_of(self, tensor: Tensor) -> int | None:
        return self._alive.get(tensor.untyped_storage()._cdata)

    def in_use(self, without: Iterable[int | None]) -> list[int]:
        """Bytes in use after each change, some storages left out."""
        excluded, total, course = set(without), 0, [0]
        for number, change in self.changes:
            total += 0 if number in excluded else change
            course.append(total)
        return course

    def _freed(self, key: int, number: int, nbytes: int) -> None:
        del self._alive[key]
        self.changes.append((number, -nbytes))


class Counter:
    """Counts while it is entered.

    Args:
        elsewhere: folders and files whose code is not this rank's program on its device: emulated engines, messages
            between hosts.
        engine_operators: what an engine's own operators do, by namespace: takes an operator's name and arguments.
    """

    def __init__(
        self,
        elsewhere: Iterable[Path] = (),
        engine_operators: Mapping[str, Callable[[str, Sequence[Any]], EngineCall]] | None = None,
    ) -> None:
        self._elsewhere = tuple(str(path) for path in elsewhere)
        self._engine_operators = engine_operators or {}
        self._is_on = False
        self._in_method = False
        self._on_host: weakref.WeakSet[Any] = weakref.WeakSet()
        self._launched: collections.Counter[str] = collections.Counter()
        self._syncs: list[str] = []
        self._sent_bytes = 0
        self._memory = Memory()

    def __enter__(self) -> Counter:
        with ExitStack() as entered:
            for name in READING_METHODS:
                entered.enter_context(patch.object(Tensor, name, self._reading(name)))
            entered.enter_context(patch.object(torch, "tensor", self._made_of_host_values()))
            entered.enter_context(_Watch(self))
            self._entered = entered.pop_all()
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        self._entered.close()

    def mark(self) -> None:
        """What is in use now is kept: the end of the forward."""
        self._memory.mark = len(self._memory.changes)

    def result(self, not_counted: Iterable[Tensor]) -> Counts:
        """What was counted, the memory of some tensors left out."""
        in_use = self._memory.in_use([self._memory.number_of(tensor) for tensor in not_counted])
        kept, peak = in_use[self._memory.mark], max(in_use)
        return Counts(dict(self._launched), self._syncs, self._sent_bytes, kept, peak)

    @contextmanager
    def inside(self, owner: object, *names: str) -> Iterator[None]:
        """While the block runs, what some methods do is seen also where an operator calls them."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(owner, name, self._visible(getattr(owner, name))))
            yield

    def engine_call(self, name: str, call: EngineCall, returned: Any, on_host: Iterable[Tensor] = ()) -> None:
        """Count a call of an engine.

        Args:
            name: for `Counts.launched`.
            call: what it does.
            returned: what it gave back; its tensors are new.
            on_host: those among them that the host may read without waiting.
        """
        if not self._is_on:
            return
        self._launched[name] += call.launches
        self._syncs.extend([f"inside {name}"] * call.syncs)
        self._sent_bytes += call.sent_bytes
        self._on_host.update(tensor.untyped_storage() for tensor in on_host)
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                self._memory.made(tensor)

    def _visible(self, function: Callable) -> Callable:
        def seen(*args: Any, **kwargs: Any) -> Any:
            # An operator takes the modes off; a backward function is called under them.
            if not self._is_on or any(isinstance(mode, _Watch) for mode in _get_current_dispatch_mode_stack()):
                return function(*args, **kwargs)
            with _Watch(self):
                return function(*args, **kwargs)

        return seen

    def saw(self, func: Any, args: list[Any], result: Any) -> None:
        """Count a call of an operator."""
        name = func._schema.name
        if func.namespace == "expertmesh" or self._is_elsewhere():
            return
        if func.namespace in self._engine_operators:
            self.engine_call(name, self._engine_operators[func.namespace](name, args), result)
            return
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        returned = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        new = [tensor for tensor in returned if tensor.untyped_storage()._cdata not in given]
        for tensor in new:
            self._memory.made(tensor)
        if func.overloadpacket in READING_OPS or _reads_sizes(func, args):
            self._sync(name)
        self._sent_bytes += _sent_bytes(name, args)
        is_empty = bool(returned) and not any(tensor.numel() for tensor in returned)
        is_nothing = func.overloadpacket in ALLOCATIONS or name in NO_WORK or is_empty
        # The schema of c10d's operators does not say that they write.
        writes = func._schema.is_mutable or func.namespace == "c10d"
        if (new or writes) and not is_nothing:
            self._launched[name] += 1

    def _reading(self, name: str) -> Callable:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._in_method or self._is_elsewhere() or tensor.untyped_storage() in self._on_host:
                return original(tensor, *args, **kwargs)
            self._sync(name)
            with self._one_method():
                return original(tensor, *args, **kwargs)

        return read

    def _made_of_host_values(self) -> Callable:
        original = torch.tensor

        def tensor(*args: Any, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            if kwargs.get("device") is not None and not self._is_elsewhere():
                self._sync("torch.tensor on a device")
                self._launched["torch.tensor"] += 1
            return made

        return tensor

    def _sync(self, name: str) -> None:
        if not self._in_method:
            self._syncs.append(f"{name} in {_caller()}")

    @contextmanager
    def _one_method(self) -> Iterator[None]:
        self._in_method = True
        try:
            yield
        finally:
            self._in_method = False

    def _is_elsewhere(self) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._elsewhere):
                return True
            frame = frame.f_back
        return False


class _Watch(TorchDispatchMode):
    """Shows a counter what is called."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._counter.saw(func, [*args, *(kwargs or {}).values()], result)
        return result


def _reads_sizes(func: Any, args: list[Any]) -> bool:
    """Whether an operator has to know values because of how it was called."""
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        return any(tensor is not None and tensor.dtype in MASKS for tensor in args[1])
    if func.overloadpacket is aten.repeat_interleave:
        return isinstance(args[0], Tensor) and not any(isinstance(each, int) for each in args)
    return False


def _sent_bytes(name: str, args: list[Any]) -> int:
    """What a collective sends to other ranks.

    Raises:
        NotImplementedError: another collective than the layers here use.
    """
    namespace, _, operator = name.partition("::")
    if namespace not in ("c10d", "_c10d_functional") or name in NO_WORK:
        return 0
    if name == "_c10d_functional::all_to_all_single":
        rows, _, send_sizes, group = args
        rank = dist.get_rank(torch.distributed.distributed_c10d._resolve_process_group(group))
    elif name == "c10d::alltoall_base_":
        _, rows, group, _, send_sizes = args[:5]
        ranks = dist.ProcessGroup.unbox(group)
        rank, send_sizes = ranks.rank(), send_sizes or [rows.shape[0] // ranks.size()] * ranks.size()
    else:
        raise NotImplementedError(f"{operator} is not counted")
    row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
    return sum(size for other, size in enumerate(send_sizes) if other != rank) * row_bytes


def _caller() -> str:
    """The file of the innermost frame that is not this file's and not PyTorch's."""
    frame = sys._getframe(1)
    skipped = (__file__, str(Path(torch.__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name
