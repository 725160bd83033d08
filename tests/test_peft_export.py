"""`expertmesh export` of adapters: merged as PEFT merges, and taken apart by expert as PEFT and servers read it.

Merged models equal `merge_and_unload().save_pretrained()` to the last bit, in float32 and in bfloat16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from expertmesh_plugins.peft import save_adapters
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from processes import clean_environment
from ranks.models import VOCABULARY, build, randomize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from expertmesh import cli
from expertmesh.checkpoint import Checkpoint
from expertmesh.checkpoint.export import PEAK_BYTES, export, export_merged, export_per_expert
from expertmesh.checkpoint.inspection import inspect, verify
from expertmesh.errors import CheckpointError, ConfigError

EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
UNGATED = {"target_parameters": ["experts.up_proj", "experts.down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
LATENT_ATTENTION = {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"]}
FAMILIES = {
    "qwen3_moe": EXPERTS | ATTENTION,
    "mixtral": EXPERTS | ATTENTION,
    "deepseek_v3": EXPERTS | LATENT_ATTENTION,
    "gpt_oss": EXPERTS | ATTENTION,
    "nemotron_h": UNGATED | ATTENTION,
    "granitemoe": EXPERTS | ATTENTION,
}
KINDS = {
    "up alone": {"target_parameters": EXPERTS["target_parameters"][:1]},
    "down alone": {"target_parameters": EXPERTS["target_parameters"][1:]},
    "rewritten by PEFT": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"]},
    "patterns": EXPERTS | ATTENTION | {"rank_pattern": {".*down_proj": 2}, "alpha_pattern": {".*gate_up_proj": 5}},
    "rank-stabilised": EXPERTS | ATTENTION | {"use_rslora": True, "r": 3},
    "dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved": ATTENTION | {"modules_to_save": ["lm_head", "norm"]},
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # PEFT's about its own patterns and embeddings.
        warnings.simplefilter("ignore")
        yield


def make(folder: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **lora: object) -> PeftModel:
    """A base model in `base` and an adapter in `adapter` whose every tensor differs from zero. Returns the model."""
    build(family).to(dtype).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    # Some weights are kept in float32, whatever the file says.
    base.save_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **lora}))
    for wrapped in (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)):
        randomize(wrapped.modules_to_save)
    model.save_pretrained(folder / "adapter")
    return model.eval()


def loaded(folder: Path, adapter: str = "adapter") -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / adapter).eval()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_merged(folder: Path, merged: Path) -> None:
    loaded(folder).merge_and_unload().save_pretrained(folder / "stock")
    expected, found, base = weights_of(folder / "stock"), weights_of(merged), weights_of(folder / "base")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert any(not torch.equal(tensor, base[name]) for name, tensor in expected.items())


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_is_what_peft_merges(family, dtype, tmp_path):
    make(tmp_path, family, dtype, **FAMILIES[family])
    export_merged(tmp_path / "adapter", str(tmp_path / "out"), max_shard_size=50_000)
    assert_merged(tmp_path, tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.dtype == dtype and not any(report.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_merged_as_peft_does(kind, tmp_path):
    make(tmp_path, **KINDS[kind])
    export_merged(tmp_path / "adapter", str(tmp_path / "out"))
    assert_merged(tmp_path, tmp_path / "out")


def test_trained_biases_are_merged_too(tmp_path):
    model = make(tmp_path, "qwen2_moe", bias="lora_only", **ATTENTION)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter.data)
    model.save_pretrained(tmp_path / "adapter")
    export_merged(tmp_path / "adapter", str(tmp_path / "out"))
    assert_merged(tmp_path, tmp_path / "out")


def test_adapters_on_tied_embeddings_are_merged_once(tmp_path):
    build(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["embed_tokens"])
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    export_merged(tmp_path / "adapter", str(tmp_path / "out"))
    assert_merged(tmp_path, tmp_path / "out")
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(build(tie_word_embeddings=True), config).save_pretrained(tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"lm_head.weight or model.embed_tokens.weight of its own.*ties the two"):
        export_merged(tmp_path / "untied", str(tmp_path / "other"), base=str(tmp_path / "base"))


def test_the_command_line_merges_and_keeps_what_belongs_to_a_model(tmp_path, capsys):
    make(tmp_path, **EXPERTS)
    (tmp_path / "base" / "tokenizer.json").write_text('"of the base"')
    (tmp_path / "base" / "vocab.txt").write_text("of the base")
    (tmp_path / "adapter" / "tokenizer.json").write_text('"of the adapter"')
    arguments = [str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge"]
    assert cli.export([*arguments, "--dtype", "bf16", "--max-shard-size", "50KB"]) == 0
    assert capsys.readouterr().out == f"saved to {tmp_path / 'out'}\n"
    names = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "vocab.txt", "model.safetensors.index.json",
        "expertmesh.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"of the adapter"'
    assert not verify(inspect(tmp_path / "out")).problems
    loaded(tmp_path).merge_and_unload().save_pretrained(tmp_path / "stock")
    found = weights_of(tmp_path / "out")
    assert all(torch.equal(found[k], v.bfloat16()) for k, v in weights_of(tmp_path / "stock").items())
    with pytest.raises(ConfigError, match="--overwrite"):
        cli.export(arguments)
    assert cli.export([*arguments, "--overwrite", "--base", str(tmp_path / "base")]) == 0
    assert weights_of(tmp_path / "out")["lm_head.weight"].dtype == torch.float32


def test_a_checkpoint_of_adapters_is_merged_unless_it_is_damaged(tmp_path):
    model = make(tmp_path, **EXPERTS)
    checkpoint = tmp_path / "checkpoint-3"
    with Checkpoint(checkpoint) as writing:
        save_adapters(model, writing.folder)
        writing.commit(step=3)
    export_merged(checkpoint, str(tmp_path / "out"))
    assert_merged(tmp_path, tmp_path / "out")
    assert inspect(tmp_path / "out").step == 3
    path = checkpoint / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for form in (export_merged, export_per_expert):
        with pytest.raises(CheckpointError, match=r"adapter_model.safetensors was damaged"):
            form(checkpoint, str(tmp_path / "other"))


def test_a_damaged_base_is_noticed_on_the_way(tmp_path):
    make(tmp_path, **EXPERTS)
    export(tmp_path / "base", str(tmp_path / "noted"))
    (path,) = (tmp_path / "noted").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="was damaged since it was written"):
        export_merged(tmp_path / "adapter", str(tmp_path / "out"), base=str(tmp_path / "noted"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base", "x"], "--base means nothing without --merge"),
        (["--merge", "--config", "x"], "--config means nothing together with --merge"),
        (["--merge", "--adapter-format", "per_expert"], "--adapter-format means nothing together with --merge"),
        (["--adapter-format", "per_expert", "--dtype", "bf16"], "--dtype means nothing together with --adapter-format"),
        (["--adapter-format", "fused"], "invalid choice"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        cli.export([str(tmp_path), str(tmp_path / "out"), *arguments])


def other_base(folder: Path, **changes: object) -> None:
    build(**changes).save_pretrained(folder / "base")


def lora_bias(folder: Path) -> None:
    edit(folder / "adapter" / "adapter_config.json", lora_bias=True)


def of_old_peft(folder: Path, version: str = "0.18.1") -> None:
    """As PEFT 0.18 wrote stacks: with input and output the other way round."""
    edit(folder / "adapter" / "adapter_config.json", peft_version=version)
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name and ".lora_A." in name]:
        b = name.replace("lora_A", "lora_B")
        tensors[name], tensors[b] = tensors[b].T.contiguous(), tensors[name].T.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def square_of_old_peft(folder: Path) -> None:
    make(folder, target_parameters=["experts.gate_up_proj"])
    other_base(folder, moe_intermediate_size=16)
    edit(folder / "adapter" / "adapter_config.json", peft_version="0.18.0")


def without_tensors(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp" not in k}, path, metadata={"format": "pt"})


def other_method(folder: Path) -> None:
    config = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    get_peft_model(build(), config).save_pretrained(folder / "adapter")


def initialised_from_base(folder: Path) -> None:
    edit(folder / "adapter" / "adapter_config.json", init_lora_weights="pissa")


def rank_of_zero(folder: Path) -> None:
    edit(folder / "adapter" / "adapter_config.json", r=0)


def base_in_quants(folder: Path) -> None:
    edit(folder / "base" / "config.json", quantization_config={"quant_method": "fp8"})


def unreadable_config(folder: Path) -> None:
    (folder / "adapter" / "adapter_config.json").write_text("[")


def base_of_another_size(folder: Path) -> None:
    # The configuration says one thing and the weights another.
    weights = load_file(folder / "base" / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    path = folder / "base" / "model.safetensors"
    save_file({**weights, name: weights[name][:8].clone()}, path, metadata={"format": "pt"})


def base_with_a_hole(folder: Path) -> None:
    weights = load_file(folder / "base" / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "base" / "model.safetensors", metadata={"format": "pt"})


BAD = {
    "another family": (partial(other_base, family="nemotron_h"), r"does not fit NemotronHForCausalLM.*--base"),
    "another depth": (partial(other_base, num_hidden_layers=1), r"not in the model: .*layers\.1\."),
    "another width": (partial(other_base, hidden_size=64), r"size mismatch for .*q_proj.*--base"),
    "more layers": (partial(other_base, num_hidden_layers=3), r"missing: .*layers\.2\."),
    "a lost tensor": (without_tensors, r"missing: .*layers\.1\.mlp\.experts"),
    "lora_bias": (lora_bias, "trained with lora_bias"),
    "A and B swapped": (of_old_peft, r"size mismatch.*the other way round before 0\.19"),
    "A and B swapped, unsaid": (partial(of_old_peft, version=None), r"size mismatch.*the other way round before 0\.19"),
    "maybe swapped": (square_of_old_peft, r"the other way round before 0\.19.*train it again"),
    "no LoRA": (other_method, "holds a IA3 adapter: only LoRA"),
    "PiSSA": (initialised_from_base, "init_lora_weights='pissa', which changed the base model"),
    "rank 0": (rank_of_zero, "`r` should be a positive integer"),
    "quantized": (base_in_quants, "quantized"),
    "no JSON": (unreadable_config, r"adapter_config.json cannot be read"),
    "misshapen base": (base_of_another_size, r"the model's shape: model.layers.0.mlp.experts.gate_up_proj"),
    "incomplete base": (base_with_a_hole, r"not in its files: model.layers.0.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_merged_is_refused_by_name_before_anything_is_written(case, tmp_path):
    spoil: Callable[[Path], None]
    spoil, said = BAD[case]
    make(tmp_path, **EXPERTS, **ATTENTION)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=said) as refusal:
        export_merged(tmp_path / "adapter", str(tmp_path / "out"), base=str(tmp_path / "base"))
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.glob("out*"))


def test_what_is_no_adapter_or_no_base_is_refused(tmp_path):
    make(tmp_path, **ATTENTION)
    adapter, out = tmp_path / "adapter", str(tmp_path / "out")
    with pytest.raises(CheckpointError, match="pass --merge"):
        export(adapter, out)
    with pytest.raises(CheckpointError, match=r"holds no PEFT adapter"):
        export_merged(tmp_path / "base", out)
    with pytest.raises(ConfigError, match=r"no base model: name one with --base"):
        export_merged(adapter, out, base=str(adapter))
    with pytest.raises(ConfigError, match="is not empty"):
        export_merged(adapter, str(tmp_path / "base"))
    with pytest.raises(ConfigError, match="the checkpoint itself"):
        export_merged(adapter, str(tmp_path / "base"), overwrite=True)
    edit(adapter / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(ConfigError, match=r"does not say which base .*--base"):
        export_merged(adapter, out)
    assert not list(tmp_path.glob("out*"))


def test_merging_never_holds_the_model_or_a_stack(tmp_path):
    program = (
        "import sys; from pathlib import Path; from expertmesh.checkpoint.export import export_merged\n"
        "folder = Path(sys.argv[1]); export_merged(folder / 'adapter', str(folder / 'out'))\n"
        # Unlike ru_maxrss, not what the process was forked from.
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(1024 * int(status['VmHWM'].split()[0]))"
    )
    sizes = {"small": {}, "large": {"hidden_size": 256, "intermediate_size": 1024, "num_local_experts": 64}}
    stack = 64 * 256 * 2 * 1024 * 4
    peaks = {}
    for size, changes in sizes.items():
        (tmp_path / size).mkdir()
        model = build("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"], **changes)
        model.save_pretrained(tmp_path / size / "base")
        config = LoraConfig(r=1, init_lora_weights=False, **EXPERTS)
        model.name_or_path = str(tmp_path / size / "base")
        get_peft_model(model, config).save_pretrained(tmp_path / size / "adapter")
        command = [sys.executable, "-c", program, str(tmp_path / size)]
        finished = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, check=True, timeout=120
        )
        peaks[size] = int(finished.stdout)
    assert sum(path.stat().st_size for path in (tmp_path / "large" / "out").glob("*.safetensors")) > 1.5 * stack
    assert peaks["large"] - peaks["small"] < min(stack, PEAK_BYTES) / 2, peaks


LINEARS = {
    "qwen3_moe": {"gate_proj", "up_proj", "down_proj"},
    "mixtral": {"w1", "w2", "w3"},
    "deepseek_v3": {"gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("family", LINEARS)
def test_peft_reads_per_expert_adapters_back(family, tmp_path):
    model = make(tmp_path, family, **FAMILIES[family])
    assert export_per_expert(tmp_path / "adapter", str(tmp_path / "per_expert"))
    tensors = weights_of(tmp_path / "per_expert")
    names = [name.removeprefix("base_model.model.").split(".lora_")[0] for name in tensors if ".experts." in name]
    assert {name.rpartition(".")[2] for name in names} == LINEARS[family]
    assert {f"{name}.weight" for name in names} <= weights_of(tmp_path / "base").keys()
    config = json.loads((tmp_path / "per_expert" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == LINEARS[family] | set(FAMILIES[family]["target_modules"])
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 8, {}) and not config["target_parameters"]
    expected = logits(model)
    assert (logits(loaded(tmp_path, "per_expert")) - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert not verify(inspect(tmp_path / "per_expert")).problems


@pytest.mark.parametrize("kind", ["down alone", "rewritten by PEFT", "patterns", "rank-stabilised"])
def test_per_expert_adapters_keep_ranks_and_scalings(kind, tmp_path):
    model = make(tmp_path, **KINDS[kind])
    assert export_per_expert(tmp_path / "adapter", str(tmp_path / "per_expert"))
    config = json.loads((tmp_path / "per_expert" / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    assert not config["use_rslora"]
    for pattern, rank in config["rank_pattern"].items():
        assert config["alpha_pattern"][pattern] / rank == pytest.approx(scaling), "one scaling for all"
    expected = logits(model)
    # A ratio of scalings goes into B, which rounds.
    assert (logits(loaded(tmp_path, "per_expert")) - expected).abs().max() <= 1e-6 * expected.abs().max()
    export_merged(tmp_path / "per_expert", str(tmp_path / "merged"), base=str(tmp_path / "base"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("family", "lora"), [("nemotron_h", FAMILIES["nemotron_h"]), ("qwen3_moe", KINDS["up alone"])])
def test_per_expert_adapters_that_peft_cannot_read_say_so_and_add_up_to_the_original(family, lora, tmp_path, capsys):
    model = make(tmp_path, family, **lora)
    arguments = [str(tmp_path / "adapter"), str(tmp_path / "out"), "--adapter-format", "per_expert"]
    assert cli.export(arguments) == 0
    assert "PEFT would leave out what is for single experts" in capsys.readouterr().out
    tensors, base = weights_of(tmp_path / "out"), weights_of(tmp_path / "base")
    model.merge_and_unload().save_pretrained(tmp_path / "stock")
    stock = weights_of(tmp_path / "stock")
    linears = [key for key in tensors if ".experts." in key and ".lora_A." in key]
    assert linears
    for key in linears:
        name = f"{key.removeprefix('base_model.model.').split('.lora_')[0]}.weight"
        merged = base[name] + 2 * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        torch.testing.assert_close(merged, stock[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_models_published_with_stacks_have_no_per_expert_names(family, tmp_path):
    make(tmp_path, family, **FAMILIES[family])
    with pytest.raises(CheckpointError, match="published as stacks"):
        export_per_expert(tmp_path / "adapter", str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_without_adapted_stacks_there_is_nothing_to_take_apart(tmp_path):
    make(tmp_path, **ATTENTION)
    with pytest.raises(CheckpointError, match="nothing to take apart"):
        export_per_expert(tmp_path / "adapter", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="export the adapter to a folder"):
        export_per_expert(tmp_path / "adapter", "file:///nowhere/model")
