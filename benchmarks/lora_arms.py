"""The arms of the LoRA benchmark: the same adapters on the same frozen model, trained in four ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from step_arms import RANKS, Workload, adamw, fsdp2_accelerator, load
from torch import Tensor
from torch.distributed.tensor import DTensor

RANK = 8
CONFIG = LoraConfig(
    r=RANK,
    lora_alpha=2 * RANK,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    task_type="CAUSAL_LM",
)


class AdapterStep:
    """What one rank does with its share of a batch: forward, backward, and AdamW on the adapters."""

    def __init__(self, accelerator: Accelerator, saved: Path) -> None:
        model = load(saved)
        torch.manual_seed(1)
        model = get_peft_model(model, CONFIG)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._backward = accelerator.backward
        self._model, self._optimizer = accelerator.prepare(model, adamw(trained))

    def __call__(self, tokens: Tensor) -> Tensor:
        loss = self._model(input_ids=tokens, labels=tokens).loss
        self._finish(loss)
        return loss.detach()

    def saved_for_backward(self, tokens: Tensor) -> list[tuple[tuple[int, ...], int]]:
        """Shape and bytes of every tensor that a forward keeps for the backward, parameters apart.

        Views of the same memory count once, and what FSDP2 gathered and has freed again does not count.
        """
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _note(kept, tensor), lambda tensor: tensor):
            loss = self._model(input_ids=tokens, labels=tokens).loss
            own = {storage for parameter in self._model.parameters() for storage in _storages(parameter)}
            found = [
                (tuple(tensor.shape), tensor.untyped_storage().nbytes())
                for storage, tensor in kept.items()
                if storage not in own
            ]
            self._finish(loss)
        return found

    def _finish(self, loss: Tensor) -> None:
        self._backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()


def peft_fsdp2(saved: Path) -> AdapterStep:
    """PEFT's own wrapper of expert weights, under what `accelerate launch` gives without expert parallelism."""
    return AdapterStep(fsdp2_accelerator(), saved)


def peft_alone(saved: Path) -> AdapterStep:
    """PEFT's own wrapper in one process with one rank's tokens: no weight is gathered and nothing is reduced."""
    return AdapterStep(Accelerator(), saved)


def expertmesh_fsdp2(saved: Path) -> AdapterStep:
    """Ours without expert parallelism: what the grouped adapters gain by themselves."""
    return _expertmesh(saved, ep_size=1)


def expertmesh_ep(saved: Path) -> AdapterStep:
    """Ours, the ranks sharing the experts."""
    return _expertmesh(saved, ep_size=RANKS)


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        name: for the report.
        build: the step of one rank.
        ranks: how many processes train.
    """

    name: str
    build: Callable[[Path], AdapterStep]
    ranks: int = RANKS


ARMS = {
    "a": Arm("PEFT under Accelerate FSDP2", peft_fsdp2),
    "b": Arm("PEFT in one process, one rank's tokens", peft_alone, ranks=1),
    "c": Arm("expertmesh, FSDP2 without EP", expertmesh_fsdp2),
    "d": Arm("expertmesh EP", expertmesh_ep),
}


def merged_bytes(workload: Workload, saved: Iterable[tuple[tuple[int, ...], int]]) -> int:
    """Bytes of those tensors that are as large as a layer's stack of one projection, of all experts or one rank's."""
    config = workload.config
    down = config.num_experts * config.hidden_size * config.moe_intermediate_size
    stacks = {projection * down // share for projection in (1, 2) for share in (1, RANKS)}
    return sum(nbytes for shape, nbytes in saved if len(shape) == 3 and torch.Size(shape).numel() in stacks)


def _expertmesh(saved: Path, ep_size: int) -> AdapterStep:
    from expertmesh import ExpertMeshConfig

    return AdapterStep(Accelerator(parallelism_config=ExpertMeshConfig(dp_shard_size=RANKS, ep_size=ep_size)), saved)


def _note(kept: dict[int, Tensor], tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kept.setdefault(local.untyped_storage()._cdata, local)
    return tensor


def _storages(parameter: Tensor) -> Iterable[int]:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    yield local.untyped_storage()._cdata
