"""The arms of the step benchmark: the same model, tokens and optimizer, trained in four ways.

An arm is a function from a saved model to a `Step`: what one rank does with its share of a batch. What is not compared
(weights, tokens, attention, expert GEMM, optimizer, no gradient clipping) is the same in all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

RANKS = 2
VOCABULARY = 4096
NUM_EXPERTS = 64
TOP_K = 8
HEAD_DIM = 64

Step = Callable[[Tensor], Tensor]
BuildStep = Callable[[Path], Step]


@dataclass(frozen=True)
class Workload:
    """The sizes that decide where a step's time goes: GEMM (hidden, intermediate) against tokens moved."""

    hidden_size: int
    moe_intermediate_size: int
    sequences: int
    sequence_length: int
    num_layers: int = 4

    @property
    def config(self) -> Qwen3MoeConfig:
        heads = self.hidden_size // HEAD_DIM
        return Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1),
            head_dim=HEAD_DIM,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            use_cache=False,
        )

    def tokens(self, step: int, rank: int) -> Tensor:
        """One rank's token ids in one step; the same for every arm."""
        generator = torch.Generator().manual_seed(step * RANKS + rank)
        return torch.randint(0, VOCABULARY, (self.sequences, self.sequence_length), generator=generator)


WORKLOADS = {
    "A": Workload(hidden_size=256, moe_intermediate_size=384, sequences=4, sequence_length=128),
    "B": Workload(hidden_size=512, moe_intermediate_size=256, sequences=8, sequence_length=256),
    "smoke": Workload(hidden_size=64, moe_intermediate_size=32, sequences=2, sequence_length=32, num_layers=2),
}


def save_initial_model(workload: Workload, folder: Path) -> None:
    """Write the weights that every arm starts from."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(workload.config).save_pretrained(folder)


def accelerate_fsdp2(saved: Path) -> Step:
    """What `accelerate launch` gives without expert parallelism: every layer's experts are gathered on every rank."""
    return _prepared(fsdp2_accelerator(), saved)


def fsdp2_accelerator(**options: object) -> Accelerator:
    """An `Accelerator` that does FSDP2 on CPU. `options` are more of the FSDP plugin's."""
    accelerator = Accelerator()
    # Accelerate turns FSDP on for accelerators only; on CPU its state has to be told.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **options
    )
    return accelerator


def transformers_ep(saved: Path) -> Step:
    """Transformers' own expert parallelism, which shards while it loads."""
    distributed = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation="all_to_all")
    model = load(saved, distributed_config=distributed)
    return _step(model, adamw(model.parameters()))


def expertmesh_ep(saved: Path) -> Step:
    """Ours, as a script that builds its own `Accelerator` would use it."""
    from expertmesh import ExpertMeshConfig

    return _prepared(Accelerator(parallelism_config=ExpertMeshConfig(dp_shard_size=RANKS, ep_size=RANKS)), saved)


def floor(saved: Path) -> Step:
    """A lower bound: the arithmetic that one rank of an expert-parallel step cannot avoid, and nothing else.

    It does: the whole forward and backward of everything but the experts on this rank's tokens, router included; the
    expert GEMMs, activations and routing weights of as many rows as a rank gets on average (tokens x top-k) on the
    experts a rank holds (half of them); AdamW on those experts and on half of the dense weights, as FSDP2 leaves them.
    It does not: talk to the other rank, gather, permute or copy a token, or wait for a rank with more rows than the
    average. So its loss is not the model's loss, and its memory is no bound (it keeps the dense weights whole).
    """
    model = load(saved)
    for layer in model.model.layers:
        layer.mlp.experts = StationaryExperts(layer.mlp.experts)
    experts = [parameter for layer in model.model.layers for parameter in layer.mlp.experts.parameters()]
    shares = [DenseShare(parameter) for parameter in _others(model, experts)]
    optimizer = adamw([*experts, *(share.mine for share in shares)])

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for share in shares:
            share.take_gradient()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


ARMS: dict[str, tuple[str, BuildStep]] = {
    "a": ("Accelerate FSDP2, no EP", accelerate_fsdp2),
    "b": ("Transformers EP", transformers_ep),
    "c": ("expertmesh EP", expertmesh_ep),
    "d": ("floor: no token moved", floor),
}


def load(saved: Path, **options: object) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm", **options
    )
    return model.train()


def adamw(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> torch.optim.AdamW:
    """The Hugging Face Trainer's default optimizer with its default settings."""
    return torch.optim.AdamW(parameters, lr=5e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True)


def _prepared(accelerator: Accelerator, saved: Path) -> Step:
    model = load(saved)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    return _step(model, optimizer, accelerator.backward)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None] = Tensor.backward
) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _others(model: nn.Module, known: list[nn.Parameter]) -> list[nn.Parameter]:
    taken = {id(parameter) for parameter in known}
    return [parameter for parameter in model.parameters() if id(parameter) not in taken]


class DenseShare:
    """The half of a dense weight that FSDP2 would let this rank update. It shares the weight's memory."""

    def __init__(self, whole: nn.Parameter) -> None:
        self.whole = whole
        self.mine = nn.Parameter(self._first_share(whole.data))

    def take_gradient(self) -> None:
        self.mine.grad = self._first_share(self.whole.grad)
        self.whole.grad = None

    def _first_share(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[: tensor.numel() // RANKS]


class StationaryExperts(nn.Module):
    """One rank's experts, computing on tokens where they lie: a perfectly balanced routing that needs no permutation.

    With `groups = experts / top-k`, the tokens are cut into `groups` contiguous chunks, and in top-k slot `s` chunk `c`
    goes to expert `s * groups + c`. Every token thus meets top-k different experts, every expert gets
    `tokens * top-k / experts` rows, and the input of every GEMM is a view of the tokens.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        held = experts.num_experts // RANKS
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.data[:held].clone())
        self.down_proj = nn.Parameter(experts.down_proj.data[:held].clone())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _StationaryExperts.apply(hidden_states, top_k_weights, self.gate_up_proj, self.down_proj)


class _StationaryExperts(torch.autograd.Function):
    """The gated experts with a backward written by hand, so that autograd adds no pass over rows or weights."""

    @staticmethod
    def forward(ctx, hidden: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:  # noqa: ANN001
        chunks, weights, gate_up_slots, down_slots = _by_slot(hidden, top_k_weights, gate_up, down)
        projected = hidden.new_empty(*weights.shape[:-1], gate_up.shape[1])
        output = torch.zeros_like(chunks)
        for slot, weight in enumerate(weights):
            gate, up = torch.bmm(chunks, gate_up_slots[slot].mT, out=projected[slot]).chunk(2, dim=-1)
            output.baddbmm_(F.silu(gate).mul_(up).mul_(weight), down_slots[slot].mT)
        ctx.save_for_backward(hidden, top_k_weights, gate_up, down, projected)
        return output.view_as(hidden)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        hidden, top_k_weights, gate_up, down, projected = ctx.saved_tensors
        chunks, weights, gate_up_slots, down_slots = _by_slot(hidden, top_k_weights, gate_up, down)
        grad_output = grad_output.reshape(chunks.shape)
        grad_hidden, grad_weights = torch.zeros_like(chunks), torch.empty_like(weights)
        grad_gate_up, grad_down = torch.empty_like(gate_up_slots), torch.empty_like(down_slots)
        grad_projected = torch.empty_like(projected[0])
        grad_gate, grad_up = grad_projected.chunk(2, dim=-1)
        for slot, weight in enumerate(weights):
            gate, up = projected[slot].chunk(2, dim=-1)
            silu = F.silu(gate)
            activated = silu * up
            grad_activated = torch.bmm(grad_output, down_slots[slot])
            torch.sum(grad_activated * activated, dim=-1, keepdim=True, out=grad_weights[slot])
            torch.bmm(grad_output.mT, activated.mul_(weight), out=grad_down[slot])
            grad_activated.mul_(weight)
            torch.mul(grad_activated, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_activated.mul_(up), gate, grad_input=grad_gate)
            torch.bmm(grad_projected.mT, chunks, out=grad_gate_up[slot])
            grad_hidden.baddbmm_(grad_projected, gate_up_slots[slot])
        return (
            grad_hidden.view_as(hidden),
            grad_weights.view(weights.shape[0], -1).t(),
            grad_gate_up.view_as(gate_up),
            grad_down.view_as(down),
        )


def _by_slot(hidden: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Views of all operands cut into the top-k slots and chunks of `StationaryExperts`."""
    top_k = top_k_weights.shape[1]
    groups = gate_up.shape[0] // top_k
    return (
        hidden.view(groups, -1, hidden.shape[1]),
        top_k_weights.t().reshape(top_k, groups, -1, 1),
        gate_up.view(top_k, groups, *gate_up.shape[1:]),
        down.view(top_k, groups, *down.shape[1:]),
    )
