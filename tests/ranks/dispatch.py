"""The all-to-all dispatcher on ranks with different numbers of tokens, one of them none: run by `test_dispatch.py`.

Every rank checks itself against the experts of all ranks, computed without moving a token, and asserts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from host_reads import host_reads
from leaving import leave
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher
from expertmesh.dispatch.transport import Situation
from expertmesh.dispatch.transported import TransportDispatcher

EXPERTS, TOP_K, HIDDEN = 8, 3, 16


class Counted(AllToAll):
    """Counts all-to-alls of rows, and the rows they carry."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.rows: list[int] = []

    def _exchange(self, rows, recv_sizes, send_sizes):
        self.rows.append(rows.shape[0])
        return super()._exchange(rows, recv_sizes, send_sizes)


def experts_of_rank(dispatched: Dispatched, scales: Tensor) -> Tensor:
    """Expert `e` multiplies its tokens with `scales[e]`; returns each token's weighted sum."""
    counts = torch.tensor(dispatched.rows.rows_per_expert)
    assert torch.equal(dispatched.rows.offsets, counts.cumsum(0).int())
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    index = dispatched.rows.token_index
    weight = (scales[expert] * dispatched.row_weights).to(dispatched.tokens.dtype).unsqueeze(1)
    output = torch.zeros(dispatched.tokens.shape, dtype=dispatched.tokens.dtype)
    return output.index_add(0, index, dispatched.tokens[index] * weight)


def run(dispatcher: TokenDispatcher, scales: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    hidden, weights = (tensor.clone().requires_grad_() for tensor in (hidden, weights))
    with host_reads() as seen:
        dispatched = dispatcher.dispatch(hidden, index, weights)
    assert [read.split()[0] for read in seen] == ["tolist"], f"one read-back a layer: {seen}"
    output = dispatcher.combine(experts_of_rank(dispatched, scales), dispatched.state)
    output.float().square().sum().backward()
    return [output.detach(), hidden.grad, weights.grad]


def check(mesh: DeviceMesh, index: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(len(index), HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(len(index), TOP_K, generator=generator)
    scales = torch.linspace(0.5, 2, EXPERTS)
    expected = run(LocalDispatcher(EXPERTS), scales, hidden, index, weights)
    local = EXPERTS // size
    situation = Situation(
        ep_size=size, num_experts=EXPERTS, hidden=HIDDEN, dtype=dtype, device=torch.device("cpu"), ranks_per_node=size
    )
    transport = Counted(mesh, situation)
    actual = run(TransportDispatcher(transport), scales[rank * local : (rank + 1) * local], hidden, index, weights)
    for ours, alone in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)
        assert ours.dtype == alone.dtype
    once_a_rank = sum(len(set(row)) for row in (index // local).tolist())
    received = transport.rows[1]
    # Forward: rows, results. Backward: gradients of results, gradients of rows.
    assert transport.rows == [once_a_rank, received, once_a_rank, received], transport.rows


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        num_tokens = (7, 0, 12, 3)[rank]
        distinct = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        check(mesh, distinct, dtype, tolerance)
        check(mesh, torch.randint(0, EXPERTS, (num_tokens, TOP_K), generator=generator), dtype, tolerance)
        check(mesh, torch.full((num_tokens, TOP_K), 5), dtype, tolerance)
        check(mesh, torch.zeros(0, TOP_K, dtype=torch.long), dtype, tolerance)
    print("ok")
    leave()


if __name__ == "__main__":
    main()
