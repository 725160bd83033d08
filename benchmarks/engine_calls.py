"""What the engines that need a GPU do in one call, read from their sources, to be counted where they are emulated.

Launches are kernels and copies:

- DeepEP 1.2.1 inside a node: one kernel for a layout; a notification and a transfer for each dispatch and each combine.
- DeepEP 2.1.0: a transfer and an epilogue for each dispatch and each combine.
- HybridEP: for a layout the exchange of the routing and a scan; a copy into the engine's buffer, the transfer and the
  permutation for a dispatch; the reverse for a combine; one more copy where weights travel.
- Transformer Engine 2.20.2: one kernel for a routing; for each transfer a copy and the transfer. **Assumed**: its
  kernels are in a binary.

Each of them sends a token once to each rank, and brings one sum a rank back, in the dtype of the tokens. With a token
travel its weights (float32) and expert ids (int64), and back travel the gradients of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

from counting import Counter, EngineCall
from torch import Tensor

WEIGHT, ID = 4, 8
TRANSFORMER_ENGINE = "transformer_engine_ep"


@dataclass(frozen=True)
class Traffic:
    """What one rank's tokens mean for every engine.

    Attributes:
        tokens: of this rank.
        sent: (token, other rank) pairs.
        received: tokens from other ranks.
        top_k: experts of a token.
        num_experts: over all ranks.
        ranks: how many.
    """

    tokens: int
    sent: int
    received: int
    top_k: int
    num_experts: int
    ranks: int

    def there(self, rows: Tensor, with_routing: bool) -> int:
        """Bytes of sending tokens like `rows`."""
        return self.sent * (_row_bytes(rows) + with_routing * self.top_k * (WEIGHT + ID))

    def back(self, rows: Tensor, with_weights: bool) -> int:
        """Bytes of sending sums like `rows` back."""
        return self.received * (_row_bytes(rows) + with_weights * self.top_k * WEIGHT)


Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class EngineMethod:
    """A method of an engine's class.

    Attributes:
        owner, name: which.
        cost: what a call with some arguments does.
        on_host: what of its result the host may read freely.
    """

    owner: str
    name: str
    cost: Callable[[Arguments, Traffic], EngineCall]
    on_host: Callable[[Any], Sequence[Tensor]] = lambda returned: ()


def _v1_dispatch(call: Arguments, traffic: Traffic) -> EngineCall:
    plans = call["handle"] is None
    return EngineCall(2, int(plans), traffic.there(call["x"], plans))


def _v2_dispatch(call: Arguments, traffic: Traffic) -> EngineCall:
    plans = call["handle"] is None
    waits = plans if call["do_cpu_sync"] is None else call["do_cpu_sync"]
    return EngineCall(2, int(waits), traffic.there(call["x"], plans))


def _combine(call: Arguments, traffic: Traffic) -> EngineCall:
    return EngineCall(2, 0, traffic.back(call["x"], call["topk_weights"] is not None))


def _hybrid_dispatch(call: Arguments, traffic: Traffic) -> EngineCall:
    plans = call["handle"] is None
    routing = (traffic.ranks - 1) * traffic.tokens * traffic.num_experts if plans else 0
    return EngineCall(6 if plans else 3, int(plans), routing + traffic.there(call["hidden"], plans))


def _counts_of(returned: Any) -> Sequence[Tensor]:
    counts = returned[3]
    return () if counts is None else (counts,)


def _hybrid_combine(call: Arguments, traffic: Traffic) -> EngineCall:
    weighted = call["probs"] is not None
    return EngineCall(3 + weighted, 0, traffic.back(call["hidden"], weighted))


# What a transport, by the name of its class, calls.
_ELASTIC = (EngineMethod("ElasticBuffer", "dispatch", _v2_dispatch), EngineMethod("ElasticBuffer", "combine", _combine))
METHODS: dict[str, tuple[EngineMethod, ...]] = {
    "AllToAll": (),
    "DeepEPV1": (
        EngineMethod("Buffer", "get_dispatch_layout", lambda call, traffic: EngineCall(1, 0, 0)),
        EngineMethod("Buffer", "dispatch", _v1_dispatch),
        EngineMethod("Buffer", "combine", _combine),
    ),
    "DeepEPV2": _ELASTIC,
    "DeepEPExpanded": _ELASTIC,
    "HybridEP": (
        # The counts of rows are written to the host's memory.
        EngineMethod("HybridEPBuffer", "dispatch_with_permute", _hybrid_dispatch, _counts_of),
        EngineMethod("HybridEPBuffer", "combine_with_unpermute", _hybrid_combine),
    ),
    # Its calls are operators.
    "TransformerEngineEP": (),
}


def engine_operators(traffic: Traffic) -> dict[str, Callable[[str, Sequence[Any]], EngineCall]]:
    """What `Counter` takes for engines that are operators."""

    def cost(name: str, args: Sequence[Any]) -> EngineCall:
        match name.removeprefix(f"{TRANSFORMER_ENGINE}::"), args:
            case "prepare", _:
                return EngineCall(1, 0, 0)
            case "dispatch", (_, _, tokens, *_):
                return EngineCall(2, 0, traffic.there(tokens, True))
            case "combine_bwd", (_, gradients, *_):
                return EngineCall(2, 0, traffic.there(gradients, False))
            case "combine", (_, rows, *_):
                return EngineCall(2, 0, traffic.back(rows, False))
            case "dispatch_bwd", (_, rows, *_):
                return EngineCall(2, 0, traffic.back(rows, True))
        raise NotImplementedError(f"{name} is not counted")

    return {TRANSFORMER_ENGINE: cost}


@contextmanager
def counted(
    module: ModuleType | None, methods: Sequence[EngineMethod], counter: Counter, traffic: Traffic
) -> Iterator[None]:
    """While the block runs, a counter is told of every call of an engine's methods."""
    with ExitStack() as stack:
        for method in methods:
            owner = getattr(module, method.owner)
            original = getattr(owner, method.name)
            stack.enter_context(patch.object(owner, method.name, _telling(original, method, counter, traffic)))
        yield


def _telling(original: Callable, method: EngineMethod, counter: Counter, traffic: Traffic) -> Callable:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        returned = original(*args, **kwargs)
        cost = method.cost(bound.arguments, traffic)
        counter.engine_call(f"{method.owner}.{method.name}", cost, returned, method.on_host(returned))
        return returned

    return call


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()
