"""A rank's peak memory without the memory: the arm's own code on fake tensors, under PyTorch's `MemTracker`.

Nothing is computed, so nobody knows which experts tokens choose. Where code reads that back, `ForeseenCounts` answers
with what a router that prefers no expert makes of it on average.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from memory_arms import ARMS, Workload, adam, train_step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _RefType
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

GIB = 2**30


class ForeseenCounts(FakeTensorMode):
    """Fake tensors whose numbers are read as the counts of a balanced routing.

    Two kinds of tensors are read back, `[2, ranks]` by Transformers' expert parallelism and `[2, ranks,
    experts a rank + 1]` by ours, both int64: rows to and from each rank; and rows to and from each expert, behind which
    are the tokens they are made of.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(allow_non_fake_inputs=True)
        ranks, experts = workload.ranks, workload.experts // workload.ranks
        rows = workload.tokens * workload.top_k // workload.experts
        # How many of the `top_k` different experts of a token are all elsewhere: C(E - e, k) / C(E, k).
        elsewhere = math.comb(workload.experts - experts, workload.top_k) / math.comb(workload.experts, workload.top_k)
        tokens = round(workload.tokens * (1 - elsewhere))
        self._answers = {2 * ranks: [rows * experts], 2 * ranks * (experts + 1): [rows] * experts + [tokens]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [argument for argument in tree_leaves((args, kwargs)) if isinstance(argument, Tensor)]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # A mesh's ranks, for instance, which were there before.
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            (number,) = tensors
            answer = self._answers.get(number.untyped_storage().nbytes() // number.dtype.itemsize)
            if answer is not None:
                return answer[number.storage_offset() % len(answer)]
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Kind(_RefType):
    """`MemTracker`'s kinds of memory, and one more."""

    PARAM = "Parameter"
    BUFFER = "Buffer"
    GRAD = "Gradient"
    ACT = "Activation"
    TEMP = "Temp"
    OPT = "Optstate"
    OTH = "Other"
    LOGITS = "Logits"


class _Tracker(MemTracker):
    """Tells logits, and what is made of them in their size, from other activations."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._ref_class = _Kind
        self._vocabulary = workload.vocabulary

    def _track(self, reftype: Enum, t: Tensor) -> None:
        is_logits = t.ndim > 1 and t.shape[-1] == self._vocabulary
        super()._track(_Kind.LOGITS if is_logits else reftype, t)


def foresee(arm: str, workload: Workload) -> dict[str, float]:
    """The peak of one rank in its second step, in GiB, in whole (`peak_gib`) and by component.

    Components: `parameters` (this rank's shards), `gathered` (weights of others, and their gradients), `gradients`,
    `optimizer`, `activations`, `logits`, `temporaries` (of the backward and of the update).
    """
    dist.init_process_group("fake", rank=0, world_size=workload.ranks, store=FakeStore())
    with ForeseenCounts(workload):
        model = ARMS[arm].spread(workload.build())
        optimizer = adam(model)
        tokens = torch.zeros(1, workload.tokens, dtype=torch.long)
        tracker = _Tracker(workload)
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                train_step(model, optimizer, tokens)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    parameters = sum(_local_bytes(parameter) for parameter in model.parameters())
    found = {
        "parameters": parameters,
        "gathered": peak[_Kind.PARAM] - parameters,
        "gradients": peak[_Kind.GRAD],
        "optimizer": peak[_Kind.OPT],
        "activations": peak[_Kind.ACT] + peak[_Kind.BUFFER] + peak[_Kind.OTH],
        "logits": peak[_Kind.LOGITS],
        "temporaries": peak[_Kind.TEMP],
    }
    return {"peak_gib": peak["Total"] / GIB} | {name: nbytes / GIB for name, nbytes in found.items()}


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()
