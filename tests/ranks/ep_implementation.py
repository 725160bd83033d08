"""Transformers' own expert parallelism with our dispatchers: run by `test_ep_implementation.py` on every rank.

For each case one process trains a step on the whole batch; then all ranks do, on models that
`from_pretrained(distributed_config=...)` sharded, once with an implementation of ours and once with Transformers' own.
Rank 0 prints one JSON object with the errors of the losses and gradients. The test has installed a dispatcher `halfway`
that does not work on rank 1.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from emulation import precision
from emulation.install import installed
from expertmesh_plugins.deepep import destroy_buffers
from expertmesh_plugins.transformer_engine import finalize
from leaving import leave
from models import batches, build
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import expertmesh  # noqa: F401  (registers the names)
from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.errors import ConfigError
from expertmesh.experts import find_experts

ROWS, LENGTH = 8, 12
THEIRS = "all_to_all"
# A gradient below this part of the model's largest is zero but for rounding.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Case:
    """A model, how `DistributedConfig` spreads it, and which implementations are compared."""

    sizes: dict[str, int]
    family: str = "qwen3_moe"
    ours: str = "expertmesh"
    checkpointing: bool = False
    first_rank_only: bool = False
    hidden: int = 32
    emulation: str | None = None


def all_cases(world_size: int) -> dict[str, Case]:
    if world_size == 2:
        return {
            "ep2": Case({"fsdp_size": 2, "ep_size": 2}),
            "by-name": Case({"fsdp_size": 2, "ep_size": 2}, ours="expertmesh_all_to_all"),
            "checkpointing": Case({"fsdp_size": 2, "ep_size": 2}, checkpointing=True),
            "same-batch": Case({"tp_size": 2, "ep_size": 2}),
            "gpt_oss": Case({"fsdp_size": 2, "ep_size": 2}, family="gpt_oss"),
            "mixtral": Case({"fsdp_size": 2, "ep_size": 2}, family="mixtral"),
            "deepep-v1": Case({"fsdp_size": 2, "ep_size": 2}, ours="deepep", emulation="deep_ep_v1", hidden=128),
            "deepep-v2": Case({"fsdp_size": 2, "ep_size": 2}, ours="deepep", emulation="deep_ep_v2", hidden=256),
            "expanded": Case(
                {"fsdp_size": 2, "ep_size": 2}, ours="deepep_expanded", emulation="deep_ep_v2", hidden=256
            ),
            "hybridep": Case({"fsdp_size": 2, "ep_size": 2}, ours="hybridep", emulation="hybrid_ep"),
            "te_ep": Case({"tp_size": 2, "ep_size": 2}, ours="te_ep", emulation="te"),
        }
    return {
        "ep4": Case({"fsdp_size": 4, "ep_size": 4}),
        "empty-ranks": Case({"fsdp_size": 4, "ep_size": 4}, first_rank_only=True),
        "ep2-efsdp2": Case({"fsdp_size": 4, "ep_size": 2}),
        "ep2-replicas2": Case({"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}),
        "ep4-tp2": Case({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
    }


def run(case: Case, folder: Path) -> dict[str, float]:
    """The largest errors of ours and of theirs against one process, and of ours against theirs."""
    reference = build(case.family, hidden_size=case.hidden)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    tokens = batches(1, ROWS, LENGTH)[0]
    route(reference, case)
    loss = reference(input_ids=tokens, labels=tokens).loss
    loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    with installed(case.emulation) if case.emulation else nullcontext():
        ours = trained(case, case.ours, folder, tokens)
        destroy_buffers()
        finalize()
    theirs = trained(case, THEIRS, folder, tokens)
    return {
        "ours": difference(ours, (loss.item(), expected)),
        "theirs": difference(theirs, (loss.item(), expected)),
        "between": difference(ours, theirs),
    }


def trained(case: Case, implementation: str, folder: Path, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss and the whole gradients after one backward."""
    config = DistributedConfig(ep_implementation=implementation, **case.sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=config
    ).train()
    route(model, case)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ranks = dist.get_world_size() // config.tp_size
    mine = tokens.chunk(ranks)[dist.get_rank() // config.tp_size]
    with patch.object(AllToAll, "plan", autospec=True, side_effect=AllToAll.plan) as plan:
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
    if implementation.startswith("expertmesh"):
        assert plan.call_count == len(find_experts(model)), "each layer routes once, recomputed or not"
    else:
        assert not plan.called
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), {name: whole(value) for name, value in model.named_parameters()}


def check_refusal(folder: Path) -> None:
    """A name that does not work on rank 1 is refused on all ranks, before weights are loaded."""
    config = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=2, ep_implementation="halfway")
    with patch.object(PreTrainedModel, "_load_pretrained_model") as load:
        try:
            AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        except ConfigError as error:
            assert "ep_dispatcher halfway cannot be used here: on rank 1: " in str(error)
        else:
            raise AssertionError("nothing was refused")
    assert not load.called


def route(model: nn.Module, case: Case) -> None:
    """Send all tokens to experts 0 and 1, which are the first rank's, if the case says so."""
    if case.first_rank_only:
        for experts in find_experts(model).values():
            experts.register_forward_pre_hook(lambda _, args: (args[0], args[1] % 2, args[2]))


def whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def difference(some: tuple[float, dict[str, Tensor]], others: tuple[float, dict[str, Tensor]]) -> float:
    """The larger of the losses' relative difference and of the gradients', each relative to its largest entry."""
    floor = ROUNDING * max(gradient.abs().max().item() for gradient in others[1].values())
    assert some[1].keys() == others[1].keys()
    differences = [
        (some[1][name] - gradient).abs().max().item() / max(gradient.abs().max().item(), floor)
        for name, gradient in others[1].items()
    ]
    return max(abs(some[0] - others[0]) / abs(others[0]), *differences)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Engines send bfloat16 only, which would hide errors.
    precision.ALLOW_FLOAT32 = True
    results = {name: run(case, Path(sys.argv[1], name)) for name, case in all_cases(dist.get_world_size()).items()}
    check_refusal(next(Path(sys.argv[1]).iterdir()))
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
