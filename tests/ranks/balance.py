"""Balanced by one process against balanced by many: run by `test_balance.py` on every rank; rank 0 prints JSON.

The one process knows nothing of ours: its auxiliary loss is Transformers' own, its z-loss is written out here from the
router logits that the model returns, its bias update from the choices that its experts are given. Both sides take three
optimizer steps on the same tokens. A tensor's error is relative to its own largest entry, as in `parity.py`.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from leaving import leave
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh import parallelize
from expertmesh.balance import bias, ranks, routed, z_loss
from expertmesh.balance.loss_use import loss_used
from expertmesh.config import ExpertParallelConfig
from expertmesh.experts import find_experts
from expertmesh.observe import ExpertLoad
from ranks.families import build_family
from ranks.models import batches

STEPS, BATCH, LENGTH = 3, 8, 12
ROUNDING = 1e-4
AUX, Z, RATE = 0.5, 0.1, 0.01
BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Case:
    """What is balanced how, on which mesh. `checkpointing` is ours, `reentrant` the kind of Transformers' own."""

    ep: int = 1
    replicas: int = 1
    family: str = "qwen3_moe"
    aux: bool = False
    z: bool = False
    bias: bool = False
    micro_batches: int = 1
    padded: bool = False
    checkpointing: str = "none"
    reentrant: bool | None = None
    config: dict[str, object] = field(default_factory=dict)
    fault: tuple[object, str, object] | None = None


def all_cases(size: int) -> dict[str, Case]:
    """Every mechanism on every mesh, and what can get in its way on one of them."""
    meshes = {"ep": Case(ep=size), "efsdp": Case(ep=size // 2)}
    cases = {}
    for name, mesh in meshes.items():
        cases[f"aux-{name}"] = Case(ep=mesh.ep, aux=True)
        cases[f"z-{name}"] = Case(ep=mesh.ep, z=True)
        cases[f"bias-{name}"] = Case(ep=mesh.ep, family="deepseek_v3", bias=True)
    if size == 4:
        everything = {"aux": True, "z": True, "micro_batches": 2, "padded": True}
        return cases | {
            "everything": Case(ep=2, checkpointing="full", **everything),
            "everything-replicas": Case(ep=2, replicas=2, reentrant=False, **everything),
            "bias-everything": Case(ep=2, family="glm4_moe", z=True, bias=True, micro_batches=2, reentrant=True),
        }
    cases["aux-accumulation"] = Case(ep=2, aux=True, micro_batches=2)
    cases["aux-padded"] = Case(ep=2, aux=True, padded=True)
    cases["z-accumulation"] = Case(ep=2, z=True, micro_batches=2)
    cases["bias-accumulation"] = Case(ep=2, family="deepseek_v3", bias=True, micro_batches=2)
    for name, kind in {
        "full": {"checkpointing": "full"},
        "selective": {"checkpointing": "selective"},
        "reentrant": {"reentrant": True},
        "not-reentrant": {"reentrant": False},
    }.items():
        cases[f"z-{name}"] = Case(ep=2, z=True, micro_batches=2, **kind)
        cases[f"bias-{name}"] = Case(ep=2, family="glm4_moe", bias=True, micro_batches=2, **kind)
    cases["aux-full"] = Case(ep=2, aux=True, checkpointing="full")
    cases["aux-not-reentrant"] = Case(ep=2, aux=True, reentrant=False)
    for family in ("qwen2_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe"):
        cases[f"family-{family}"] = Case(ep=2, family=family, aux=True, z=True)
    for family in ("deepseek_v3", "glm4_moe", "nemotron_h", "lfm2_moe", "minimax_m2", "laguna", "ernie4_5_moe"):
        cases[f"family-{family}"] = Case(ep=2, family=family, z=True, bias=True)
    return cases | faults()


undivided = staticmethod(lambda ctx, grad: grad)


def faults() -> dict[str, Case]:
    """What would go wrong if something were done otherwise: whose attribute becomes what."""
    return {
        "fault-local-aux": Case(ep=2, aux=True, config={"ep_balance_aux_loss": "local"}),
        "fault-aux-gradient": Case(ep=2, aux=True, fault=(ranks._SumOverRanks, "backward", undivided)),
        "fault-z-gradient": Case(ep=2, z=True, fault=(z_loss, "num_ranks", lambda: 1)),
        "fault-counted-twice": Case(ep=2, checkpointing="full", fault=(routed, "is_recomputation", lambda: False)),
        "fault-local-load": Case(ep=2, family="deepseek_v3", bias=True, fault=(bias, "num_ranks", lambda: 1)),
    }


def run(case: Case) -> dict[str, float]:
    """Train both ways and compare, with the fault if there is one."""
    with mock.patch.object(*case.fault) if case.fault else nullcontext():
        return compare(case)


def compare(case: Case) -> dict[str, float]:
    reference = build_family(case.family)
    assert not case.aux or hasattr(reference, "router_aux_loss_coef")
    reference.router_aux_loss_coef = AUX * case.aux
    reference.config.output_router_logits = case.aux
    parallel = copy.deepcopy(reference)
    if case.reentrant is not None:
        parallel.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": case.reentrant})
    config = ExpertParallelConfig(
        ep_size=case.ep,
        dp_replicate_size=case.replicas,
        ep_activation_checkpointing=case.checkpointing,
        **{"ep_z_loss": Z * case.z, "ep_balance_bias_rate": RATE * case.bias, **case.config},
    )
    parallelize(parallel, config)
    counted = ExpertLoad(parallel, ep_size=case.ep)
    expected_load = Load(reference, case.ep)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (reference, parallel)]
    named = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in parallel.named_parameters()}
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "bias": 0.0, "load": 0.0}
    rank, size = dist.get_rank(), dist.get_world_size()
    for tokens in batches(STEPS, BATCH, LENGTH):
        parts = tokens.chunk(case.micro_batches)
        expected = backward(reference, [inputs(part, case.padded) for part in parts], Z * case.z)
        mine = [inputs(part, case.padded) for part in parts]
        shares = [{name: tensor.chunk(size)[rank] for name, tensor in part.items()} for part in mine]
        loss = weighted(parallel, shares, mine)
        worst["loss"] = max(worst["loss"], abs(loss - expected) / abs(expected))
        largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
        for name, parameter in reference.named_parameters():
            if not parameter.requires_grad:
                continue
            error = relative(named[name].grad.full_tensor(), parameter.grad, ROUNDING * largest)
            worst["gradient"] = max(worst["gradient"], error)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if case.bias:
            expected_load.move_biases(reference)
        worst["load"] = max(worst["load"], expected_load.differs(counted))
    for name, parameter in reference.named_parameters():
        worst["parameter"] = max(worst["parameter"], relative(named[name].full_tensor(), parameter))
    if case.bias:
        worst["bias"] = bias_error(reference, parallel)
    gathered = [None] * size
    dist.all_gather_object(gathered, worst)
    return {name: max(one[name] for one in gathered) for name in worst}


def bias_error(reference: nn.Module, parallel: nn.Module) -> float:
    """How far any correction bias, a buffer or a parameter without gradient, is from one process's."""
    saved = parallel.state_dict()
    used = {
        name.replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in (*parallel.named_buffers(), *parallel.named_parameters())
    }
    errors = []
    for name, expected in reference.state_dict().items():
        if name.endswith(BIASES):
            actual = whole(used[name])
            assert torch.equal(actual, whole(saved[name])), "what is saved is not what is used"
            errors.append((actual - expected).abs().max().item())
    return max(errors)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inputs(tokens: Tensor, padded: bool) -> dict[str, Tensor]:
    """A batch, whose second half is half padding if `padded`: different ranks then have different numbers of tokens."""
    if not padded:
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones_like(tokens)
    mask[len(tokens) // 2 :, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


def backward(model: nn.Module, parts: list[dict[str, Tensor]], z: float) -> float:
    """One process."""
    total = 0.0
    for part in parts:
        output = model(**part, output_router_logits=True)
        loss = output.loss
        if z:
            loss = (
                loss + z * torch.cat([logits.float().logsumexp(-1) for logits in output.router_logits]).square().mean()
            )
        (loss / len(parts)).backward()
        total += loss.item() / len(parts)
    return total


def weighted(model: nn.Module, parts: list[dict[str, Tensor]], wholes: list[dict[str, Tensor]]) -> float:
    """All ranks. Without padding a rank's mean loss; with padding its tokens' share of the global mean."""
    total = torch.zeros(())
    for number, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
        model.set_requires_gradient_sync(number == len(parts) - 1)
        if "attention_mask" in part:
            items = (whole["labels"][:, 1:] != -100).sum()
            with loss_used(multiplied=dist.get_world_size()):
                loss = model(**part, num_items_in_batch=items).loss * dist.get_world_size()
        else:
            loss = model(**part).loss
        (loss / len(parts)).backward()
        total += loss.detach() / len(parts)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Load:
    """What one process's experts were given, counted in the plainest way."""

    def __init__(self, model: nn.Module, ep_size: int) -> None:
        self.ep_size = ep_size
        self.choices: dict[str, list[Tensor]] = {}
        for name, experts in find_experts(model).items():
            self.choices[name] = []
            experts.register_forward_pre_hook(lambda _, args, name=name: self.choices[name].append(args[1].detach()))

    @torch.no_grad()
    def move_biases(self, model: nn.Module) -> None:
        """DeepSeek's update."""
        for name, choices in self.choices.items():
            load = torch.cat(choices).flatten().bincount(minlength=8).double()
            block = model.get_submodule(name.removesuffix(".experts"))
            (moved,) = (tensor for key, tensor in block.state_dict().items() if key.endswith(BIASES))
            before = moved.clone()
            moved += RATE * (load.mean() - load).sign().float()
            assert not torch.equal(before, moved), "nothing was moved"

    def differs(self, counted: ExpertLoad) -> float:
        """1.0 if a count is wrong. Starts anew."""
        loads = {name.replace("_checkpoint_wrapped_module.", ""): load for name, load in counted.read().items()}
        wrong = set(loads) != set(self.choices)
        for name, choices in self.choices.items():
            chosen = torch.cat(choices)
            ranks = [
                sum(bool((token // (8 // self.ep_size) == rank).any()) for token in chosen)
                for rank in range(self.ep_size)
            ]
            wrong |= loads[name].experts.tolist() != chosen.flatten().bincount(minlength=8).tolist()
            wrong |= loads[name].ranks.tolist() != ranks
            choices.clear()
        return float(wrong)


def relative(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    return (actual - expected).abs().max().item() / max(expected.abs().max().item(), floor)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    only = sys.argv[1:]
    results = {name: run(case) for name, case in all_cases(dist.get_world_size()).items() if not only or name in only}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
