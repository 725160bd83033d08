"""Tokens travel on fake tensors: with symbols for sizes that nobody knows, or with sizes that a fake mode answers."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from expertmesh.dispatch import ops
from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.dispatch.transport import Situation, TransportHandle
from expertmesh.dispatch.transported import TransportDispatcher

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 8, 2, 16, 12
# What each rank says that it sends to each: rows of either of its experts, and the tokens they are made of.
ANSWER = [3, 2, 4]


class Answering(FakeTensorMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return ANSWER[args[0].storage_offset() % len(ANSWER)]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def transport():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    situation = Situation(
        ep_size=RANKS, num_experts=EXPERTS, hidden=HIDDEN, dtype=torch.float32, device=torch.device("cpu")
    )
    yield AllToAll(mesh, situation)
    dist.destroy_process_group()


def routed(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=requires_grad)
    return hidden, torch.zeros(TOKENS, TOP_K, dtype=torch.long), torch.rand(TOKENS, TOP_K, requires_grad=requires_grad)


def test_unknown_sizes_are_symbols(transport):
    handle = TransportHandle(transport)
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = routed()
        route = ops.plan(*inputs, handle)
        (arriving,) = ops.send(*inputs, route, handle)
        returning = ops.send_back(arriving[:, :HIDDEN], route, handle)
    assert isinstance(arriving.shape[0], torch.SymInt) and isinstance(returning.shape[0], torch.SymInt)
    assert route.counts.shape == (EXPERTS // RANKS,) and returning.shape[1] == HIDDEN


def test_sizes_that_the_mode_answers_are_used_there_and_back(transport):
    dispatcher = TransportDispatcher(transport)
    with Answering():
        hidden, index, weights = routed(requires_grad=True)
        dispatched = dispatcher.dispatch(hidden, index, weights)
        assert dispatched.tokens.shape == (RANKS * ANSWER[-1], HIDDEN)
        assert dispatched.rows.rows_per_expert == [RANKS * count for count in ANSWER[:-1]]
        assert dispatched.row_weights.shape == (RANKS * sum(ANSWER[:-1]),)
        output = dispatcher.combine(dispatched.tokens, dispatched.state)
        (output.sum() + dispatched.row_weights.sum()).backward()
    assert output.shape == hidden.grad.shape == hidden.shape and weights.grad.shape == weights.shape
