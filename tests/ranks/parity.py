"""One process against many: run by `test_parity.py` on every rank; rank 0 prints one JSON object with all results.

    python parity.py [lora | engine <emulation> <dispatcher>]

For each case a model is trained twice from the same weights on the same tokens: by one process, and by all ranks
through `parallelize`. Reported are the errors of the loss, of every gradient, of the gradient norm, and of every
parameter after three optimizer steps. A tensor's error is relative to its own largest entry (see `ROUNDING`).
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from leaving import leave

sys.path.append(str(Path(__file__).parents[1]))

from emulation import precision
from emulation.install import installed
from expertmesh_plugins.peft.experts import b_as_stored
from expertmesh_plugins.transformer_engine import finalize
from models import batches, build
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from expertmesh import parallelize
from expertmesh.adapters import find_adapters
from expertmesh.config import ExpertParallelConfig
from expertmesh.experts import find_experts

STEPS = 3
# A gradient below this part of the model's largest is zero but for rounding (a router whose choices do not matter).
ROUNDING = 1e-4
BATCH, LENGTH = 8, 12
Routing = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh. `fault` breaks the parallel model on purpose."""

    ep: int = 1
    replicas: int = 1
    family: str = "qwen3_moe"
    model: dict[str, object] = field(default_factory=dict)
    compute: str = "auto"
    layers: str = "auto"
    fp8: bool = False
    dispatcher: str = "auto"
    routing: Routing | None = None
    freeze: Callable[[str], bool] = lambda name: False
    micro_batches: int = 1
    bf16: bool = False
    checkpointing: str = "none"
    chunks: int = 1
    compiled: bool = False
    lora: dict[str, object] | None = None
    fault: Callable[[nn.Module], None] | None = None


def one_expert(index: Tensor) -> Tensor:
    """Both slots of every token on expert 3."""
    return torch.full_like(index, 3)


def first_rank_only(index: Tensor) -> Tensor:
    """Experts 0 and 1 of 8: the other ranks of the EP group get no token."""
    return index % 2


def uneven(index: Tensor) -> Tensor:
    """Half of the choices fall on expert 5."""
    return torch.where(index < 4, 5, index)


def by_position(index: Tensor) -> Tensor:
    """Choices that depend on a token's place in its sequence only, so that no rounding can flip them."""
    position = torch.arange(index.shape[0]).unsqueeze(1) % LENGTH
    return (position + torch.tensor([0, 3])) % 8


def no_divide_factor(model: nn.Module) -> None:
    """FSDP2's own default: the mean over efsdp ranks only, gradients `ep` times too large."""
    for experts in find_experts(model).values():
        if isinstance(experts, FSDPModule):
            experts.set_gradient_divide_factor(float(experts.down_proj.device_mesh["efsdp"].size()))


def divide_twice(model: nn.Module) -> None:
    """Forced sums on one shard: FSDP2 divides by the factor twice, gradients too small."""
    for experts in find_experts(model).values():
        if isinstance(experts, FSDPModule):
            experts.set_force_sum_reduction_for_comms(True)


def forget_division(model: nn.Module) -> None:
    """Experts outside of FSDP2 whose gradients nobody divides."""
    for experts in find_experts(model).values():
        object.__setattr__(experts.forward.compute.function, "gradient_scale", 1.0)


def mesh_cases(world_size: int) -> dict[str, Case]:
    """Every mesh of the grid ep x efsdp x dp_replicate that fits the ranks."""
    cases = {}
    for ep in (1, 2, 4):
        for efsdp in (1, 2):
            for replicas in (1, 2):
                if ep * efsdp * replicas == world_size:
                    cases[f"ep{ep}-efsdp{efsdp}-replicas{replicas}"] = Case(ep=ep, replicas=replicas)
    return cases


def all_cases(world_size: int) -> dict[str, Case]:
    """All cases for a number of ranks: the grid, then what can go wrong on one of its meshes."""
    cases = mesh_cases(world_size)
    routings = {"one-expert": one_expert, "empty-rank": first_rank_only, "uneven": uneven}
    for name, routing in routings.items():
        # Unnormalised weights, so that the router has a gradient even where its choices do not matter.
        model = {"norm_topk_prob": False}
        cases[f"routing-{name}"] = Case(ep=world_size, routing=routing, model=model)
        cases[f"routing-{name}-efsdp"] = Case(ep=world_size // 2, routing=routing, model=model)
    cases["accumulation"] = Case(ep=2, micro_batches=2)
    cases["checkpointing"] = Case(ep=2, checkpointing="full")
    cases["selective-checkpointing"] = Case(ep=2, checkpointing="selective")
    cases["chunks"] = Case(ep=2, chunks=2)
    cases["chunks-empty-rank"] = Case(ep=world_size, chunks=3, routing=first_rank_only, checkpointing="full")
    cases["grouped-mm"] = Case(ep=2, compute="grouped_mm")
    cases["experts-frozen"] = Case(ep=2, freeze=lambda name: ".experts." in name)
    cases["only-experts-trained"] = Case(ep=2, freeze=lambda name: ".experts." not in name)
    cases["bf16"] = Case(ep=2, routing=by_position, bf16=True)
    if world_size == 2:
        cases |= {f"family-{name}": Case(ep=2, family=name) for name in OTHER_FAMILIES}
        cases |= {f"family-{name}-grouped-mm": Case(ep=2, family=name, compute="grouped_mm") for name in VARIANTS}
        cases["compiled"] = Case(ep=2, compiled=True)
        cases["family-gpt_oss-efsdp"] = Case(ep=1, family="gpt_oss")
        cases["fault-forgotten-division"] = Case(ep=2, fault=forget_division)
    else:
        cases["fewer-experts-than-shards"] = Case(ep=2, model={"num_experts": 2})
        cases["experts-not-divisible-by-shards"] = Case(ep=2, model={"num_experts": 6})
        cases["fault-no-divide-factor"] = Case(ep=2, fault=no_divide_factor)
        cases["fault-divided-twice"] = Case(ep=2, replicas=2, fault=divide_twice)
    return cases


OTHER_FAMILIES = (
    "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "nemotron_h", "granitemoe",
)  # fmt: skip
VARIANTS = ("gpt_oss", "nemotron_h")


def two_experts(index: Tensor) -> Tensor:
    """Experts 0 and 1 of 8: the other ranks of the EP group get no token, and no token picks an expert twice."""
    return torch.arange(2).expand_as(index).contiguous()


def one_of_one(index: Tensor) -> Tensor:
    """Expert 3, for tokens that pick a single one."""
    return torch.full_like(index, 3)


# What an engine asks of a model: a width that DeepEP's kernels take.
WIDE = {"hidden_size": 256}
UNNORMALISED = {**WIDE, "norm_topk_prob": False}


def engine_cases(world_size: int, dispatcher: str) -> dict[str, Case]:
    """Every mesh on which tokens travel, and what can go wrong there, through one engine."""
    case = partial(Case, dispatcher=dispatcher, model=WIDE)
    cases = {
        name: case(ep=mesh.ep, replicas=mesh.replicas) for name, mesh in mesh_cases(world_size).items() if mesh.ep > 1
    }
    cases["routing-empty-rank"] = case(ep=world_size, routing=two_experts, model=UNNORMALISED)
    cases["routing-one-expert"] = case(
        ep=world_size, routing=one_of_one, model={**UNNORMALISED, "num_experts_per_tok": 1}
    )
    cases["routing-all-experts"] = case(ep=world_size, model={**WIDE, "num_experts_per_tok": 8})
    if dispatcher != "hybridep" or world_size == 4:
        # HybridEP takes experts by fours.
        cases["one-expert-a-rank"] = case(ep=world_size, model={**WIDE, "num_experts": world_size})
    if world_size == 4:
        return cases
    cases["accumulation"] = case(ep=2, micro_batches=2)
    cases["checkpointing"] = case(ep=2, checkpointing="full")
    cases["selective-checkpointing"] = case(ep=2, checkpointing="selective")
    cases["chunks"] = case(ep=2, chunks=2)
    cases["chunks-empty-rank"] = case(ep=2, chunks=3, routing=two_experts, checkpointing="full", model=UNNORMALISED)
    cases["grouped-mm"] = case(ep=2, compute="grouped_mm")
    cases["experts-frozen"] = case(ep=2, freeze=lambda name: ".experts." in name)
    cases["only-experts-trained"] = case(ep=2, freeze=lambda name: ".experts." not in name)
    cases["bf16"] = case(ep=2, routing=by_position, bf16=True)
    cases |= {f"family-{name}": case(ep=2, family=name) for name in ENGINE_FAMILIES}
    both = {"target_parameters": [f"experts.{name}" for name in EXPERTS]}
    cases["lora"] = case(ep=2, lora=both)
    return cases


# Biased and transposed; ungated; with shared experts before and after the routed ones.
ENGINE_FAMILIES = ("gpt_oss", "nemotron_h", "qwen2_moe", "glm4_moe")

EXPERTS = ("gate_up_proj", "down_proj")
LORA = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "target_modules": []}


def lora_cases(world_size: int) -> dict[str, Case]:
    """Adapters on experts, on what surrounds them, and on both, over every mesh."""
    both = {"target_parameters": [f"experts.{name}" for name in EXPERTS]}
    everything = {**both, "target_modules": ["q_proj", "v_proj", "gate"]}
    cases = {
        name: Case(ep=mesh.ep, replicas=mesh.replicas, lora=everything) for name, mesh in mesh_cases(world_size).items()
    }
    if world_size == 4:
        return cases | {"empty-rank": Case(ep=4, lora=everything, routing=first_rank_only)}
    kinds = {
        "attention": {"target_modules": ["q_proj", "o_proj"]},
        "up": {"target_parameters": ["experts.gate_up_proj"]},
        "down": {"target_parameters": ["experts.down_proj"]},
        "rank-1": {**both, "r": 1, "lora_alpha": 3},
        "rank-stabilised": {**both, "use_rslora": True},
        "patterns": {**both, "rank_pattern": {".*down_proj": 2}, "alpha_pattern": {".*gate_up_proj": 5}},
        "head-saved": {**both, "modules_to_save": ["lm_head"]},
        "dora": {"target_modules": ["q_proj"], "use_dora": True},
    }
    cases |= {name: Case(ep=2, lora=kind) for name, kind in kinds.items()}
    cases["grouped-mm"] = Case(ep=2, lora={**both, "r": 3}, compute="grouped_mm")
    cases["accumulation"] = Case(ep=2, lora=everything, micro_batches=2)
    cases["checkpointing"] = Case(ep=2, lora=everything, checkpointing="full")
    cases["one-expert"] = Case(ep=2, lora=both, routing=one_expert)
    cases |= {f"family-{family}": Case(ep=2, family=family, lora=both) for family in LORA_FAMILIES}
    ungated = {"target_parameters": ["experts.up_proj", "experts.down_proj"]}
    cases["family-nemotron_h"] = Case(ep=2, family="nemotron_h", lora=ungated)
    return cases


LORA_FAMILIES = ("gpt_oss", "deepseek_v3", "mixtral", "granitemoe")


def run(case: Case) -> dict[str, float | str]:
    """Train both ways and compare."""
    reference = _prepared(case)
    parallel = copy.deepcopy(reference)
    for model in (reference, parallel):
        _route(model, case.routing)
    config = ExpertParallelConfig(
        ep_size=case.ep,
        dp_replicate_size=case.replicas,
        ep_compute=case.compute,
        ep_layers=case.layers,
        ep_dispatcher=case.dispatcher,
        ep_chunks=case.chunks,
        ep_activation_checkpointing=case.checkpointing,
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.bf16 else None
    parallelize(parallel, config, mp_policy=policy, fp8=case.fp8)
    if case.compiled:
        for block in parallel.model.layers:
            block.compile(backend="aot_eager")
    if case.fault is not None:
        case.fault(parallel)

    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = batches(STEPS, BATCH, LENGTH)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for m in (reference, parallel)
    ]
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "parameter": 0.0}
    named = _names(parallel)
    if case.bf16:
        worst["one_bf16_process"] = _bf16_error(reference, tokens[0])
    for step in range(STEPS):
        expected = _backward(reference, list(tokens[step].chunk(case.micro_batches)))
        # Each micro-batch is split over the ranks, so that both sides accumulate the same sums.
        mine = [part.chunk(size)[rank] for part in tokens[step].chunk(case.micro_batches)]
        loss = _backward(parallel, mine)
        dist.all_reduce(loss)
        worst["loss"] = max(worst["loss"], abs(loss.item() / size - expected.item()) / abs(expected.item()))
        squares = [0.0, 0.0]
        largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
        for name, parameter in reference.named_parameters():
            if not parameter.requires_grad:
                assert named[name].grad is None, f"{name} is frozen and has a gradient"
                continue
            gradient = _like(_whole(named[name].grad), parameter)
            worst["gradient"] = max(worst["gradient"], _error(gradient, parameter.grad, ROUNDING * largest))
            squares[0] += parameter.grad.double().square().sum().item()
            squares[1] += gradient.double().square().sum().item()
        worst["norm"] = max(worst["norm"], abs(squares[1] ** 0.5 - squares[0] ** 0.5) / squares[0] ** 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        worst["parameter"] = max(worst["parameter"], _error(_like(_whole(named[name]), parameter), parameter))
    return worst


def _bf16_error(reference: nn.Module, tokens: Tensor) -> float:
    """How far the gradients of one process that computes in bf16 are from those in float32."""
    exact, rounded = copy.deepcopy(reference), copy.deepcopy(reference).bfloat16()
    for model in (exact, rounded):
        _backward(model, [tokens])
    pairs = zip(rounded.parameters(), exact.parameters(), strict=True)
    return max(_error(actual.grad.float(), expected.grad) for actual, expected in pairs)


def _prepared(case: Case) -> nn.Module:
    model = build(case.family, **case.model)
    if case.lora is not None:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(**{**LORA, **case.lora}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.freeze(name))
    return model


def _route(model: nn.Module, routing: Routing | None) -> None:
    if routing is None:
        return

    def reroute(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0], routing(args[1]), args[2]

    adapted = find_adapters(model)
    for name, experts in find_experts(model).items():
        called = adapted[name].module if name in adapted else experts
        called.register_forward_pre_hook(reroute)


def _backward(model: nn.Module, parts: list[Tensor]) -> Tensor:
    total = torch.zeros(())
    for number, part in enumerate(parts):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(parts) - 1)
        loss = model(input_ids=part, labels=part).loss / len(parts)
        loss.backward()
        total += loss.detach().float()
    return total


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in model.named_parameters()}


def _whole(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor), f"a sharded model holds a plain {type(value).__name__}"
    return value.detach().full_tensor()


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the layout of one process: `lora_B` of experts is kept with the experts outermost."""
    return b_as_stored(whole) if whole.ndim > parameter.ndim else whole


def _error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    return (actual - expected).abs().max().item() / max(expected.abs().max().item(), floor)


def _then_finalize(run: Callable[[Case], dict]) -> Callable[[Case], dict]:
    def run_and_finalize(case: Case) -> dict:
        result = run(case)
        gc.collect()
        finalize()
        return result

    return run_and_finalize


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, *engine = sys.argv[1:] or ["all"]
    size = dist.get_world_size()
    with ExitStack() as stack:
        if what == "engine":
            emulation, dispatcher = engine
            stack.enter_context(installed(emulation))
            stack.enter_context(patch.object(precision, "ALLOW_FLOAT32", True))
            cases = engine_cases(size, dispatcher)
            if dispatcher == "te_ep":
                # One group a process, for one kind of model.
                stack.enter_context(patch.object(sys.modules[__name__], "run", _then_finalize(run)))
        else:
            cases = {"all": all_cases, "lora": lora_cases}[what](size)
        results = {name: run(case) for name, case in cases.items()}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
