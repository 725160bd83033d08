"""What goes wrong with expert adapters elsewhere: run by `test_peft_traps.py` on four ranks, `ep` 2 on two replicas.

Rank 0 prints one JSON object with what every case found.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from expertmesh_plugins.peft import load_adapters, save_adapters
from expertmesh_plugins.peft.experts import b_as_stored
from leaving import leave
from models import batches, build
from parity import Case, by_position
from parity import run as compare_with_one_process
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh import ExpertMeshConfig
from expertmesh.errors import ExpertMeshError
from expertmesh.finetune.adapters import peft_config
from expertmesh.finetune.lora import TARGETS, LoraRecipe

REPLICAS = EP = 2
RANK = 4
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
BOTH = {"target_parameters": EXPERTS, "target_modules": ["q_proj", "v_proj"]}
FOLDER = Path(sys.argv[1])


def adapted(seed: int = 1, dtype: torch.dtype = torch.float32, **changes: object) -> PeftModel:
    model = build().to(dtype)
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(**{"r": RANK, "lora_alpha": 12, "init_lora_weights": False, **BOTH, **changes})
    )


def prepare(
    model: nn.Module, mixed_precision: str = "no", compute: str = "auto"
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """What a script does. Its optimizer is given every parameter, the frozen ones too."""
    AcceleratorState._reset_state()
    config = ExpertMeshConfig(dp_replicate_size=REPLICAS, dp_shard_size=EP, ep_size=EP, ep_compute=compute)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, parallelism_config=config)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def mine(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def everywhere(value: object) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def wrappers(model: nn.Module) -> dict[str, ParamWrapper]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except ExpertMeshError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def golden() -> dict[str, object]:
    """What PEFT adds to each expert after reading a file saved from shards, against what the shards say."""
    found = {}
    for name, targets in {"both": EXPERTS, "up": EXPERTS[:1], "down": EXPERTS[1:]}.items():
        _, model, _ = prepare(adapted(target_parameters=targets, target_modules=[]))
        save_adapters(model, FOLDER / name)
        ours = {
            path: (whole(w.lora_A["default"].weight), whole(w.lora_B["default"].weight))
            for path, w in wrappers(model).items()
        }
        dist.barrier()
        stored = load_file(FOLDER / name / "adapter_model.safetensors")
        errors, misread = [], []
        for path, wrapper in wrappers(PeftModel.from_pretrained(build(), FOLDER / name)).items():
            delta = wrapper.get_delta_weight("default")
            (a, b), on_disk = ours[path], stored[f"{path}.lora_B.weight"]
            for expert, expected in enumerate(delta):
                own = wrapper.scaling["default"] * b[expert] @ a.view(len(delta), RANK, -1)[expert]
                swapped = (
                    wrapper.scaling["default"]
                    * on_disk.view(len(on_disk), len(delta), RANK)[:, expert]
                    @ a.view(len(delta), RANK, -1)[expert]
                )
                errors.append(((own - expected).abs().max() / expected.abs().max()).item())
                misread.append(((swapped - expected).abs().max() / expected.abs().max()).item())
        found[name] = {"keys": sorted(stored), "error": max(errors), "misread": min(misread)}
    return found


def drift() -> dict[str, object]:
    """Every rank draws other adapters. What each has of every adapter, gathered in its own replica, as hashes."""
    accelerator, model, optimizer = prepare(adapted(seed=dist.get_rank()))
    found = {"before": same_everywhere(model)}
    for tokens in batches(2, 8, 12):
        accelerator.backward(loss_of(model, mine(tokens)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {**found, "after": same_everywhere(model)}


def same_everywhere(model: nn.Module) -> int:
    """How many adapters there are, all equal on all ranks."""
    hashes = {
        name: zlib.crc32(whole(parameter.detach()).numpy().tobytes())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    all_hashes = everywhere(hashes)
    different = [name for name in hashes if len({one[name] for one in all_hashes}) > 1]
    assert not different, different
    return len(hashes)


def switching() -> dict[str, object]:
    """Two adapters in turn, none, and both at once."""
    reference, parallel = (adapted() for _ in range(2))
    for model in (reference, parallel):
        torch.manual_seed(2)
        model.add_adapter("other", LoraConfig(**BOTH, r=3, lora_alpha=5, init_lora_weights=False))
    accelerator, parallel, optimizer = prepare(parallel)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    errors = {}
    for tokens, name in zip(batches(4, 8, 12), ("default", "other", "other", "default"), strict=True):
        for model in (reference, parallel):
            model.set_adapter(name)
        expected, loss = loss_of(reference, tokens), loss_of(parallel, mine(tokens))
        expected.backward()
        accelerator.backward(loss)
        trained = {path for path, parameter in parallel.named_parameters() if parameter.grad is not None}
        assert trained == {path for path, parameter in reference.named_parameters() if parameter.grad is not None}
        errors.setdefault(name, []).append(abs(accelerator.reduce(loss.detach(), "mean").item() / expected.item() - 1))
        for stepping in (theirs, optimizer):
            stepping.step()
            stepping.zero_grad()
    tokens = batches(1, 8, 12)[0]
    with torch.no_grad(), reference.disable_adapter(), parallel.disable_adapter():
        expected, loss = loss_of(reference, tokens), loss_of(parallel, mine(tokens))
    errors["none"] = [abs(accelerator.reduce(loss, "mean").item() / expected.item() - 1)]
    parallel.base_model.set_adapter(["default", "other"])
    return {
        **{name: max(values) for name, values in errors.items()},
        "both": refusal(lambda: loss_of(parallel, mine(tokens))),
    }


def clipping() -> dict[str, object]:
    """One norm over plain FSDP2 parameters and those on the experts' mesh."""
    reference = adapted()
    accelerator, parallel, _ = prepare(adapted())
    (tokens,) = batches(1, 8, 12)
    loss_of(reference, tokens).backward()
    accelerator.backward(loss_of(parallel, mine(tokens)))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
    norm = whole(accelerator.clip_grad_norm_(parallel.parameters(), 0.1)).item()
    squares = sum(whole(p.grad).double().square().sum().item() for p in parallel.parameters() if p.grad is not None)
    return {"one process": expected, "ranks": everywhere(norm), "clipped": squares**0.5}


class Reduced(TorchDispatchMode):
    """Counts the bytes that are handed to collectives which sum."""

    OPERATORS = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.namespace == "c10d" and operator._opname in self.OPERATORS:
            given = arguments[0] if operator._opname == "allreduce_" else arguments[1]
            tensors = [given] if isinstance(given, Tensor) else given
            self.nbytes += sum(tensor.nbytes for tensor in tensors)
        return operator(*arguments, **(options or {}))


def frozen_base() -> dict[str, object]:
    """A base in bfloat16 that is left alone, adapters in float32, computed in bfloat16."""
    accelerator, model, optimizer = prepare(adapted(dtype=torch.bfloat16), mixed_precision="bf16")
    (tokens,) = batches(1, 8, 12)
    with Reduced() as reduced:
        accelerator.backward(loss_of(model, mine(tokens)))
    optimizer.step()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = optimizer.optimizer.state
    return {
        "frozen dtypes": sorted({str(parameter.dtype) for parameter in frozen}),
        "trained dtypes": sorted({str(parameter.dtype) for parameter in trained}),
        "frozen gradients": sum(parameter.grad is not None for parameter in frozen),
        "missing gradients": sum(parameter.grad is None for parameter in trained),
        "frozen states": sum(parameter in state for parameter in frozen),
        "states": sum(parameter in state for parameter in trained) - len(trained),
        "reduced bytes": reduced.nbytes,
        # Accelerate's mixed precision reduces in bfloat16: over the shards of dense weights, then over replicas.
        "adapter bytes": sum(
            2 * (parameter.to_local().numel() + ("ep" not in parameter.device_mesh.mesh_dim_names) * parameter.numel())
            for parameter in trained
        ),
    }


def odd_rank_in_bf16() -> dict[str, object]:
    """Rank 3 does not fit the strides of bfloat16's grouped GEMM. Errors of gradients, ours and PEFT's own in bf16."""
    exact, rounded = adapted(r=3), adapted(r=3).bfloat16()
    accelerator, parallel, _ = prepare(adapted(r=3), mixed_precision="bf16", compute="grouped_mm")
    (tokens,) = batches(1, 8, 12)
    for model in (exact, rounded, parallel):
        for module in wrappers(model).values():
            module.register_forward_pre_hook(lambda _, args: (args[0], by_position(args[1]), args[2]))
    loss_of(exact, tokens).backward()
    loss_of(rounded, tokens).backward()
    accelerator.backward(loss_of(parallel, mine(tokens)))
    gradients = {name: whole(p.grad) for name, p in parallel.named_parameters() if p.grad is not None}
    worst = {"ours": 0.0, "one bf16 process": 0.0}
    for (name, expected), theirs in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        if expected.grad is not None:
            ours = b_as_stored(gradients[name]) if gradients[name].ndim == 3 else gradients[name]
            for kind, gradient in (("ours", ours), ("one bf16 process", theirs.grad)):
                error = (gradient.float() - expected.grad).abs().max() / expected.grad.abs().max()
                worst[kind] = max(worst[kind], error.item())
    return worst


def every_target(family: str) -> Case:
    """All that `finetune` has a word for."""
    config = peft_config(build(family), LoraRecipe(targets=list(TARGETS)))
    lora = {"target_modules": config.target_modules, "target_parameters": config.target_parameters}
    return Case(ep=EP, replicas=REPLICAS, family=family, lora=lora)


def rewritten_targets() -> dict[str, object]:
    """Names of linears that PEFT turns into target parameters, of twice the rank where two are one weight."""
    found = {"all targets of a recipe": compare_with_one_process(every_target("qwen2_moe"))}
    for family, names in {"qwen2_moe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w2", "w3"]}.items():
        found[family] = compare_with_one_process(
            Case(ep=EP, replicas=REPLICAS, family=family, lora={"target_modules": names})
        )
    return found


def foreign_folders() -> dict[str, str]:
    """Adapters that were trained with another configuration or another model."""
    _, model, _ = prepare(adapted())
    save_adapters(model, FOLDER / "rank-4")
    found = {}
    for name, changes in {
        "rank": {"r": 8},
        "fewer": {"target_parameters": EXPERTS[:1]},
        "more": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    }.items():
        _, other, _ = prepare(adapted(**changes))
        found[name] = refusal(lambda other=other: load_adapters(other, FOLDER / "rank-4"))
    wider = build(moe_intermediate_size=48)
    _, other, _ = prepare(get_peft_model(wider, LoraConfig(r=RANK, **BOTH)))
    found["model"] = refusal(lambda: load_adapters(other, FOLDER / "rank-4"))
    return found


CASES = (
    golden, drift, switching, clipping, frozen_base, odd_rank_in_bf16, rewritten_targets, foreign_folders,
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = sys.argv[2:]
    results = {case.__name__: case() for case in CASES if not chosen or case.__name__ in chosen}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
