"""The arms of the dispatch benchmark: ways of moving tokens, alone for the time, with their experts for the counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from engine_calls import Traffic
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP

from expertmesh import ExpertParallelConfig
from expertmesh.dispatch import build_dispatcher
from expertmesh.dispatch.select import agree, ask
from expertmesh.dispatch.topology import ranks_per_node, topology
from expertmesh.dispatch.transport import Situation, Transport
from expertmesh.dispatch.transported import TransportDispatcher
from expertmesh.expert_parallel import install_forward, plan_experts, shard_by_expert
from expertmesh.experts import find_experts
from expertmesh.mesh import ExpertMesh, build_expert_mesh

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        title: what it says there.
        dispatcher: a value of `ep_dispatcher`, or `transformers` for Transformers' own expert parallelism.
        emulation: what stands for the engine where counts are taken; None where none is needed.
    """

    title: str
    dispatcher: str
    emulation: str | None = None


# Whose calls are counted, on any machine. The same dispatcher can stand for several builds of its engine.
COUNTED = {
    "transformers": Arm("Transformers' own EP", TRANSFORMERS),
    "all_to_all": Arm("all_to_all", "all_to_all"),
    "deepep_v1": Arm("deepep, V1", "deepep", "deep_ep_v1"),
    "deepep_v2": Arm("deepep, V2 compact", "deepep", "deep_ep_v2"),
    "deepep_v2_expanded": Arm("deepep, V2 expanded", "deepep_expanded", "deep_ep_v2"),
    "hybridep": Arm("hybridep", "hybridep", "hybrid_ep"),
    "te_ep": Arm("te_ep", "te_ep", "te"),
}
# Whose time is taken, where they work.
TIMED = {name: Arm(name, name) for name in ("all_to_all", "deepep", "deepep_expanded", "hybridep", "te_ep")} | {
    TRANSFORMERS: COUNTED[TRANSFORMERS]
}


@dataclass(frozen=True)
class Sizes:
    """One MoE layer.

    Attributes:
        tokens: of each rank.
        hidden, intermediate, num_experts, top_k: as in a model's configuration.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def save_model(self, folder: Path) -> None:
        """A model with one such layer, from which every arm takes its weights."""
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def traffic(self, rank: int, ranks: int) -> Traffic:
        """What the batches of all ranks mean for one of them."""
        batches = [self.batch(each, torch.float32, torch.device("cpu")) for each in range(ranks)]
        owners = [index // (self.num_experts // ranks) for _, index, _ in batches]
        goes_to = torch.stack([(owner.unsqueeze(2) == torch.arange(ranks)).any(1).sum(0) for owner in owners])
        goes_to.fill_diagonal_(0)
        sent, received = int(goes_to[rank].sum()), int(goes_to[:, rank].sum())
        return Traffic(self.tokens, sent, received, self.top_k, self.num_experts, ranks)

    def batch(self, rank: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """One rank's tokens, their experts and their weights; each expert is as likely as any other."""
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator)
        index = torch.rand(self.tokens, self.num_experts, generator=generator).argsort(1)[:, : self.top_k]
        weights = torch.rand(self.tokens, self.top_k, generator=generator)
        return hidden.to(device, dtype), index.contiguous().to(device), (weights / self.top_k).to(device, dtype)


@dataclass(frozen=True)
class Layer:
    """Experts that are spread over ranks.

    Attributes:
        forward: what the model calls: hidden states, expert ids and weights to hidden states.
        weights: this rank's parameters.
        transport: what moves the tokens, where it is ours.
        gradient_scale: what it multiplies the weights' gradients by; the rest is left to FSDP2.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: list[nn.Parameter]
    transport: Transport | None
    gradient_scale: float

    def weight_gradients(self) -> list[Tensor]:
        """This rank's part of them."""
        gradients = [weight.grad for weight in self.weights]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]


def build_layer(arm: Arm, saved: Path, dtype: torch.dtype, device: torch.device) -> Layer:
    """The experts of the saved model, multiplied by grouped GEMMs. Transformers' own on CPUs only."""
    ranks = dist.get_world_size()
    if arm.dispatcher == TRANSFORMERS:
        distributed = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
        (experts,) = find_experts(load_model(saved, dtype, distributed_config=distributed)).values()
        # Past the hooks of FSDP2, whose copies are not expert parallelism's.
        return Layer(experts.forward, list(experts.parameters()), None, 1.0)
    config = ExpertParallelConfig(ep_size=ranks, ep_dispatcher=arm.dispatcher, ep_compute="grouped_mm")
    mesh = build_expert_mesh(config, device.type)
    modules = find_experts(load_model(saved, dtype))
    ((name, plan),) = plan_experts(modules, {}, config, mesh, device, None).items()
    experts = modules[name]
    shard_by_expert(experts, plan.spec, mesh, device)
    install_forward(experts, plan, 1 / ranks, None)
    return Layer(experts, list(experts.parameters()), plan.dispatcher.transport, 1 / ranks)


@dataclass(frozen=True)
class Mover:
    """What an arm does with tokens if there are no experts.

    Attributes:
        move: tokens, expert ids and weights there and back: returns what came back, and the weights that arrived, where
            they travel.
        transport: what moves them, where it is ours.
    """

    move: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    transport: Transport | None


def build_mover(arm: Arm, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Mover | str:
    """A mover, or the reason why there is none on this machine."""
    config = ExpertParallelConfig(ep_size=dist.get_world_size())
    mesh = build_expert_mesh(config, device.type)
    if arm.dispatcher == TRANSFORMERS:
        return _transformers_mover(sizes, mesh)
    situation = Situation(
        ep_size=mesh.ep.size(),
        num_experts=sizes.num_experts,
        hidden=sizes.hidden,
        dtype=dtype,
        device=device,
        ranks_per_node=ranks_per_node(),
        topology=topology(device.type),
    )
    refused = agree(ask(arm.dispatcher, situation))[arm.dispatcher]
    if refused is not None:
        return refused
    dispatcher = build_dispatcher(arm.dispatcher, mesh.ep, situation)
    # With one rank nothing travels, and nothing is to be measured.
    assert isinstance(dispatcher, TransportDispatcher)

    def move(hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        arrived = dispatcher.dispatch(hidden, index, weights)
        return dispatcher.combine(arrived.tokens, arrived.state), arrived.row_weights

    return Mover(move, dispatcher.transport)


def _transformers_mover(sizes: Sizes, mesh: ExpertMesh) -> Mover:
    experts = nn.Module()
    experts.num_experts = sizes.num_experts // mesh.ep.size()
    # The second mesh is of the ranks with the same batch: each for itself.
    implementation = AllToAllEP(experts, mesh.ep, mesh.mesh["efsdp"])

    def move(hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows, _, _, state = implementation._dispatch_tokens(hidden, index, weights)
        return (implementation._combine_tokens(rows, state),)

    return Mover(move, None)


def load_model(saved: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    """The saved model, on the CPU if nothing else is said."""
    return AutoModelForCausalLM.from_pretrained(saved, dtype=dtype, experts_implementation="grouped_mm", **options)
