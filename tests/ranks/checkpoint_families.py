"""Weights of many families between many ranks and Hugging Face folders. Arguments: folder, names of `CASES`.

Every rank runs every case; rank 0 writes what it found wrong into `folder/CASE/problems.json`, and leaves there the
folders `stock` (`save_pretrained` of one process), `fused` (the same with the model's own names) and `ours`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from expertmesh import ExpertParallelConfig, parallelize
from expertmesh.checkpoint import load_model, save_model
from expertmesh.ranks import gather
from ranks.families import build_family
from ranks.models import randomize

ALONE = "fsdp"


@dataclass(frozen=True)
class Case:
    """A model, and two ways to spread it over the ranks: an `ep_size`, or FSDP2 alone.

    Attributes:
        family: of `families.py`.
        saved_on: how it is spread when it is saved.
        loaded_on: how the other model is spread that the files are read into.
        changes: to the family's configuration.
        dtype: of all weights.
        max_shard_size: of a file, in bytes.
    """

    family: str
    saved_on: int | str = 2
    loaded_on: int | str = 4
    changes: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    max_shard_size: int = 60_000


# Rows of several stored tensors follow each other in one.
CONCATENATED = {
    "kimi_linear": Case("kimi_linear"),
    "kimi_linear_bf16": Case("kimi_linear", 1, 2, dtype=torch.bfloat16),
    "bailing_hybrid": Case("bailing_hybrid", 4, 2),
    "glm5_next": Case("glm5_next"),
    "minimax_m3_vl": Case("minimax_m3_vl", 4, 1),
    "qwen4_exp": Case("qwen4_exp", 1, 2),
    "olmo_hybrid": Case("olmo_hybrid", ALONE, ALONE),
}
# Rows of one stored tensor are dealt out to several, or change places.
SPLIT = {
    "sarvam_moe": Case("sarvam_moe"),
    "sarvam_moe_fsdp": Case("sarvam_moe", ALONE, 2),
    "lara_mini": Case("lara_mini"),
    "kimi_k25": Case("kimi_k25"),
    "mistral_large4": Case("mistral_large4", 1, 4),
    "inkling_mm_model": Case("inkling_mm_model", 4, 2),
    "ernie4_5_vl_moe": Case("ernie4_5_vl_moe"),
}
TRANSPOSED = {
    "qwen3_vl_moe": Case("qwen3_vl_moe"),
    "qwen3_vl_moe_fsdp": Case("qwen3_vl_moe", 4, ALONE),
}
# Some ranks hold no element of the experts, or only rows of them.
FEW_EXPERTS = {
    "two_experts_fsdp": Case("mixtral", 2, ALONE, dict(num_local_experts=2)),
    "two_experts_ep2": Case("mixtral", ALONE, 2, dict(num_local_experts=2)),
    "two_experts_ep1": Case("mixtral", 1, 1, dict(num_local_experts=2, intermediate_size=25, hidden_size=34)),
}
LAYOUTS = {
    "qwen3_moe": Case("qwen3_moe", max_shard_size=5_000_000_000),
    "gpt_oss": Case("gpt_oss", 4, 1),
    "nemotron_h": Case("nemotron_h"),
    "granitemoe": Case("granitemoe"),
    "aria_text": Case("aria_text"),
    "gemma4": Case("gemma4"),
    "inkling2": Case("inkling2"),
    "jamba": Case("jamba", 4, 2),
    "deepseek_v4": Case("deepseek_v4"),
    "minimax_m2": Case("minimax_m2"),
    "qwen3_5_moe": Case("qwen3_5_moe"),
}
DTYPES_AND_TIES = {
    "qwen3_moe_bf16": Case("qwen3_moe", dtype=torch.bfloat16),
    "gpt_oss_bf16": Case("gpt_oss", dtype=torch.bfloat16),
    "tied": Case("qwen3_moe", changes=dict(tie_word_embeddings=True)),
    "tied_gemma4": Case("gemma4", 4, 2, changes=dict(tie_word_embeddings=True)),
    "buffers": Case("buffers"),
}
CASES = {**CONCATENATED, **SPLIT, **TRANSPOSED, **FEW_EXPERTS, **LAYOUTS, **DTYPES_AND_TIES}


class WithBuffers(Qwen3MoeForCausalLM):
    """A model with buffers of every kind."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("flags", torch.arange(7) % 3 == 0)
        self.register_buffer("counts", torch.arange(5, dtype=torch.int32) * 1_000_003)
        self.register_buffer("steps", torch.tensor(12345678901))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def build_case(case: Case, seed: int) -> PreTrainedModel:
    """The model of a case; every seed other than 0 gives it other weights and buffers."""
    if case.family == "buffers":
        model = WithBuffers(build_family("qwen3_moe").config)
    else:
        model = build_family(case.family, **case.changes)
    torch.manual_seed(seed)
    if seed or case.family == "buffers":
        randomize(model)
    if seed:
        for buffer in persistent_buffers(model):
            buffer.zero_()
    return model.to(case.dtype)


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    names = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in names]


def spread(model: PreTrainedModel, ways: int | str) -> PreTrainedModel:
    """Over all ranks, by `ep_size` or as FSDP2 does by itself."""
    if ways != ALONE:
        return parallelize(model, ExpertParallelConfig(ep_size=ways))
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module)
    return fully_shard(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model's state dict, gathered. Collective."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> list[str]:
    """One line for each tensor that is missing, left over, or not equal bit by bit."""
    problems = [f"{what}: only one has {name}" for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        a, b = found[name].contiguous(), expected[name].contiguous()
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{what}: {name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
            problems.append(f"{what}: {name} differs")
    return problems


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def compare_folders(ours: Path, stock: Path, case: Case) -> list[str]:
    problems = differences(stored(ours), stored(stock), "the files")
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    if index["weight_map"].keys() != stored(stock).keys():
        problems.append("the index names other tensors")
    if len(set(index["weight_map"].values())) < 2 and case.max_shard_size < 1_000_000:
        problems.append("there is one file only")
    for name in ("config.json", "generation_config.json"):
        texts = [(folder / name).read_text() if (folder / name).exists() else None for folder in (ours, stock)]
        if texts[0] != texts[1]:
            problems.append(f"{name} differs")
    return problems


def write_transposed(stock: Path, folder: Path) -> None:
    """What the Hub's files of qwen3_vl_moe look like: every expert's matrices the other way round."""
    folder.mkdir()
    tensors = stored(stock)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def run_case(case: Case, folder: Path) -> list[str]:
    rank = dist.get_rank()
    model = build_case(case, seed=0)
    sources = ["stock", "fused"]
    if rank == 0:
        model.save_pretrained(folder / "stock")
        model.save_pretrained(folder / "fused", save_original_format=False)
    if case.family == "qwen3_vl_moe":
        sources.append("transposed")
        if rank == 0:
            write_transposed(folder / "stock", folder / "transposed")
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dist.barrier()

    model = spread(model, case.saved_on)
    save_model(model, folder / "ours", max_shard_size=case.max_shard_size)
    problems = compare_folders(folder / "ours", folder / "stock", case) if rank == 0 else []

    for source in sources:
        other = spread(build_case(case, seed=1), case.loaded_on)
        load_model(other, folder / source)
        problems += differences(whole(other), truth, f"the model loaded from {source}")
    return problems


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        case_folder = folder / name
        case_folder.mkdir(exist_ok=True)
        print(f"case {name}", flush=True)
        problems = {problem for found in gather(run_case(CASES[name], case_folder)) for problem in found}
        if dist.get_rank() == 0:
            (case_folder / "problems.json").write_text(json.dumps(sorted(problems)))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
