"""What one rank of the dispatch benchmark does, and a coordinator's handle on all ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from arm_processes import ArmProcesses
from counting import Counter, Counts
from dispatch_arms import COUNTED, TIMED, Layer, Mover, Sizes, build_layer, build_mover
from engine_calls import METHODS, counted, engine_operators
from torch import Tensor

from expertmesh.dispatch import capacity
from expertmesh.dispatch.transport import Transport

TESTS = Path(__file__).parents[1] / "tests"


@dataclass(frozen=True)
class LayerStep:
    """A forward and a backward of a layer on one rank.

    Attributes:
        counts: what the device would have been made to do.
        digest: norms, which are the same for all arms but for rounding: of the output, and of the gradients of tokens,
            routing weights and experts' weights.
    """

    counts: Counts
    digest: list[float]


@dataclass(frozen=True)
class Moved:
    """Tokens there and back, and their gradients, on one rank.

    Attributes:
        sent_bytes: to other ranks.
        kernels: that the device ran, where there is one.
    """

    sent_bytes: int
    kernels: int | None


class DispatchProcesses(ArmProcesses):
    """The ranks, each with all arms."""

    def __init__(self, sizes: Sizes, saved: Path, ranks: int, device_type: str, lifetime: float) -> None:
        super().__init__("dispatch", partial(Worker, sizes, saved, device_type), ranks, lifetime, device_type)

    def count(self, arm: str) -> list[LayerStep]:
        return self.call("count", arm)

    def build(self, arm: str) -> str | None:
        """Why an arm does not work on this machine; None if it does, and is ready."""
        return self.call("build", arm)[0]

    def time(self, arm: str, repetitions: int) -> list[float]:
        """Seconds until the slowest rank was done, of each repetition."""
        return [max(seconds) for seconds in zip(*self.call("time", arm, repetitions), strict=True)]

    def look_at(self, arm: str) -> list[Moved]:
        return self.call("look_at", arm)


class Worker:
    """One rank."""

    def __init__(self, sizes: Sizes, saved: Path, device_type: str, rank: int) -> None:
        self._sizes = sizes
        self._saved = saved
        self._rank = rank
        self._is_cuda = device_type == "cuda"
        self._device = torch.device(device_type, torch.cuda.current_device()) if self._is_cuda else torch.device("cpu")
        # What a CPU is fast in, and what engines take.
        self._dtype = torch.bfloat16 if self._is_cuda else torch.float32
        self._traffic = sizes.traffic(rank, dist.get_world_size())
        self._movers: dict[str, Mover] = {}

    def count(self, name: str) -> LayerStep:
        """A step of a layer that has run before, under the counter."""
        arm = COUNTED[name]
        with _emulation(arm.emulation) as module:
            layer = build_layer(arm, self._saved, torch.bfloat16, torch.device("cpu"))
            # The first step builds buffers.
            self._step(layer, ExitStack())
            counter = self._counter()
            with self._seeing(counter, layer.transport, module):
                digest = self._step(layer, counter)
            counts = counter.result(layer.weight_gradients())
            if arm.emulation is not None:
                _destroy_buffers()
        return LayerStep(counts, digest)

    def build(self, name: str) -> str | None:
        mover = build_mover(TIMED[name], self._sizes, self._dtype, self._device)
        if isinstance(mover, str):
            return mover
        self._movers[name] = mover
        return None

    def time(self, name: str, repetitions: int) -> list[float]:
        return [self._timed(self._movers[name]) for _ in range(repetitions)]

    def look_at(self, name: str) -> Moved:
        mover = self._movers[name]
        counter, batch = self._counter(), self._batch()
        with self._seeing(counter, mover.transport, sys.modules.get("deep_ep")), counter:
            self._there_and_back(mover, *batch)
        kernels = self._kernels(mover) if self._is_cuda else None
        return Moved(counter.result(()).sent_bytes, kernels)

    def _step(self, layer: Layer, counter: Counter | ExitStack) -> list[float]:
        for weight in layer.weights:
            weight.grad = None
        hidden, index, weights = self._sizes.batch(self._rank, torch.bfloat16, torch.device("cpu"))
        hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
        gradient = torch.linspace(-1, 1, hidden.numel()).view_as(hidden).to(hidden.dtype)
        with counter:
            output = layer.forward(hidden, index, weights)
            if isinstance(counter, Counter):
                counter.mark()
            output.backward(gradient)
        weight_gradients = [gradient / layer.gradient_scale for gradient in layer.weight_gradients()]
        tensors = (output.detach(), hidden.grad, weights.grad, *weight_gradients)
        return [float(tensor.double().norm()) for tensor in tensors]

    def _batch(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = self._sizes.batch(self._rank, self._dtype, self._device)
        return hidden.requires_grad_(), index, weights.requires_grad_()

    def _timed(self, mover: Mover) -> float:
        batch = self._batch()
        self._wait()
        dist.barrier()
        start = time.perf_counter()
        self._there_and_back(mover, *batch)
        self._wait()
        return time.perf_counter() - start

    def _there_and_back(self, mover: Mover, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        results = mover.move(hidden, index, weights)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _kernels(self, mover: Mover) -> int:
        from torch.profiler import DeviceType, ProfilerActivity, profile

        batch = self._batch()
        self._wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._there_and_back(mover, *batch)
            self._wait()
        return sum(event.device_type == DeviceType.CUDA for event in profiler.events())

    def _counter(self) -> Counter:
        # The agreement on a capacity is between hosts.
        return Counter((TESTS / "emulation", Path(capacity.__file__)), engine_operators(self._traffic))

    @contextmanager
    def _seeing(self, counter: Counter, transport: Transport | None, engine: ModuleType | None) -> Iterator[None]:
        """While the block runs, a counter sees what a transport does and what it has its engine do."""
        with ExitStack() as stack:
            if transport is not None:
                stack.enter_context(counter.inside(transport, "plan", "send", "send_back"))
                stack.enter_context(counted(engine, METHODS[type(transport).__name__], counter, self._traffic))
            yield


@contextmanager
def _emulation(name: str | None) -> Iterator[ModuleType | None]:
    if name is None:
        yield None
        return
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from emulation.install import installed

    with installed(name) as module:
        yield module


def _destroy_buffers() -> None:
    """No engine outlives its emulation."""
    from expertmesh_plugins import deepep, transformer_engine

    deepep.destroy_buffers()
    transformer_engine.finalize()
