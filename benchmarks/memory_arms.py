"""The arms of the memory benchmark: one model, spread over ranks in four ways, by the same code on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from expertmesh import ExpertParallelConfig, parallelize


@dataclass(frozen=True)
class Workload:
    """A Qwen3-MoE and what one rank trains it on.

    Attributes:
        ranks: processes.
        tokens: of each rank, one sequence.
        dtype: of weights, gradients and optimizer states.
        vocabulary, hidden, intermediate, layers, heads, key_value_heads, head_dim, experts, top_k: as in a model's
            configuration; `intermediate` is an expert's.
    """

    ranks: int
    tokens: int
    dtype: torch.dtype
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    top_k: int

    @property
    def config(self) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            tie_word_embeddings=False,
            use_cache=False,
        )

    def build(self) -> PreTrainedModel:
        """The whole model on the CPU, randomly initialised."""
        model = AutoModelForCausalLM.from_config(
            self.config, dtype=self.dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
        return model.train()


# Qwen/Qwen3-30B-A3B, as NVIDIA measured it on 8 H100.
QWEN3_30B = Workload(
    ranks=8,
    tokens=4096,
    dtype=torch.bfloat16,
    vocabulary=151936,
    hidden=2048,
    intermediate=768,
    layers=48,
    heads=32,
    key_value_heads=4,
    head_dim=128,
    experts=128,
    top_k=8,
)
# The same shape, small enough to be trained for real on 2 processes: about 1 GiB each.
SMALL = replace(
    QWEN3_30B,
    ranks=2,
    tokens=2048,
    vocabulary=16384,
    hidden=1024,
    intermediate=512,
    layers=4,
    heads=8,
    key_value_heads=2,
    head_dim=64,
    experts=16,
    top_k=4,
)


@dataclass(frozen=True)
class Arm:
    """One way of spreading the model.

    Attributes:
        title: what a table says.
        spread: shards a whole model over all ranks of the default process group.
    """

    title: str
    spread: Callable[[PreTrainedModel], nn.Module]


def fsdp2(model: PreTrainedModel) -> nn.Module:
    """Transformers' model under PyTorch's FSDP2, each decoder layer a unit: every layer's experts are gathered."""
    with unset_fake_temporarily():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def transformers_ep(model: PreTrainedModel) -> nn.Module:
    """What `from_pretrained(..., distributed_config=...)` makes of a model."""
    ranks = dist.get_world_size()
    with unset_fake_temporarily():
        wanted = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
        config, _, meshes = type(model).prepare_distribute_model(wanted)
    return type(model).maybe_distribute_model(model, config, meshes)


def expertmesh(model: PreTrainedModel, **choices: Any) -> nn.Module:
    """Ours, with as many ranks to a layer's experts as there are."""
    config = ExpertParallelConfig(
        ep_size=dist.get_world_size(), ep_dispatcher="all_to_all", ep_compute="grouped_mm", **choices
    )
    return parallelize(model, config, device="cpu")


def expertmesh_selective(model: PreTrainedModel) -> nn.Module:
    """Ours, keeping what is dear to get again and recomputing the rest."""
    return expertmesh(model, ep_activation_checkpointing="selective")


ARMS = {
    "fsdp2": Arm("Transformers and FSDP2", fsdp2),
    "transformers_ep": Arm("Transformers' own EP", transformers_ep),
    "expertmesh": Arm("expertmesh", expertmesh),
    "expertmesh_selective": Arm("expertmesh, selective checkpointing", expertmesh_selective),
}


def adam(model: nn.Module) -> torch.optim.Adam:
    """The optimizer of the published measurements."""
    return torch.optim.Adam(model.parameters(), lr=1e-5, foreach=False)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Forward, backward and update; `tokens` `[1, sequence]`."""
    # Of fake positions Transformers cannot tell that they are one sequence, and would make a mask; of a mask it can.
    with unset_fake_temporarily():
        everything = torch.ones(tokens.shape, dtype=torch.long)
    model(input_ids=tokens, attention_mask=everything, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
