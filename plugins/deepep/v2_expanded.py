"""DeepEP 2.1.0, `ElasticBuffer`, expanded: rows arrive sorted by expert, and the host waits for nothing.

What is not obvious:

- Nobody on the host knows how many rows there are, so there is room for all that could be.
- An expert's rows are padded, and what is in gaps is only zero if it is asked for, in both directions; weights in gaps
  and behind the last row never are.
- `combine` adds a token's rows up by itself, and takes and returns weights of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from expertmesh_plugins.deepep.engine import ROWS_MULTIPLE
from expertmesh_plugins.deepep.v2 import ElasticTransport, Sent
from torch import Tensor

from expertmesh.dispatch.transport import Route


class DeepEPV2Expanded(ElasticTransport):
    """See the module's docstring."""

    brings_rows = True
    layout: ClassVar[Mapping[str, Any]] = {"do_expand": True, "do_zero_padding": True}
    counting: ClassVar[Mapping[str, Any]] = {"do_cpu_sync": False, "expert_alignment": ROWS_MULTIPLE}

    def route(self, num_tokens: int, sent: Sent) -> Route:
        """See `ElasticTransport.route`."""
        real = sent.handle.num_unaligned_recv_tokens_per_expert.long()
        padded = (real + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
        return Route(num_tokens, padded, None, sent)

    def received(self, route: Route, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, None]:
        """See `Transport.received`."""
        rows, weights, *_ = tensors
        ends = route.counts.cumsum(0)
        starts = ends - route.counts
        row = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
        real = route.handle.handle.num_unaligned_recv_tokens_per_expert.long()
        belongs = row - starts[expert] < real[expert]
        return rows, torch.where(belongs, weights, 0), None
