"""Weights that stay in their files: what may be asked without reading, and what touching them gives."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle

import peft
import pytest
import torch
from expertmesh_plugins.transformers.deferred_load import install
from ranks.families import BUILDERS, build_family
from ranks.models import FAMILIES, batches, build
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils
from transformers.core_model_loading import ConversionOps, WeightConverter

from expertmesh.checkpoint.deferred_tensor import DeferredParameter, DeferredTensor
from expertmesh.errors import CheckpointError
from expertmesh.host_memory import untouched

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build().save_pretrained(folder)
    return folder


@pytest.fixture
def launched(monkeypatch):
    """As in a worker of a launched job with expert parallelism."""
    original = PreTrainedModel._load_pretrained_model
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(original))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    install(modeling_utils)


def stock(folder, monkeypatch, **options):
    with monkeypatch.context() as patched:
        patched.setenv("EXPERTMESH_DEFERRED_LOAD", "0")
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def deferred(model):
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, DeferredParameter)]


def assert_equal(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def test_asking_reads_nothing(launched, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    names = [name for name, _ in model.named_parameters()]
    assert deferred(model) == names
    assert (model.dtype, model.device, model.training) == (torch.float32, torch.device("cpu"), False)
    assert model.num_parameters() == build().num_parameters()
    assert model.get_memory_footprint() > 0
    weight = model.get_parameter(WEIGHT)
    assert weight.stride() == (32, 1) and weight.stride(0) == 32 and weight.is_contiguous()
    assert "not read yet" in repr(weight) and "not read yet" in f"{weight}" and len(weight) == 32
    assert weight.contiguous() is weight and weight.type() == "torch.FloatTensor"
    assert weight.is_leaf and weight.requires_grad and weight.grad is None and weight.grad_fn is None
    assert torch.zeros_like(weight).stride() == (32, 1) and type(weight.new_empty(3)) is torch.Tensor
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(names)
    assert weight in set(model.parameters())
    repr(model)
    torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.requires_grad_(False).requires_grad_(True).zero_grad()
    model.train().gradient_checkpointing_enable()
    model.to("cpu").to(torch.bfloat16).float().cpu()
    model.tie_weights()
    assert deferred(model) == names
    twin = copy.deepcopy(model)
    assert deferred(twin) == names
    twin.lm_head.weight.data.zero_()
    assert "lm_head.weight" in deferred(model)


@pytest.mark.parametrize("shape", [(), (0, 3), (1000, 1000, 1000, 1000)], ids=str)
def test_untouched_memory_takes_no_room(shape):
    tensor = untouched(shape, torch.bfloat16)
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
    if len(shape) == 4:
        tensor[999, 999, 999] = 1
        assert tensor[999, 999, 999].sum() == 1000 and tensor[0, 0, 0].sum() == 0


TOUCHES = {
    "compute": lambda weight: weight + 1,
    "compute right": lambda weight: 2 * weight,
    "matmul": lambda weight: torch.ones(3, 32) @ weight,
    "function of a list": lambda weight: torch.cat([weight, weight]),
    "index": lambda weight: weight[3, 4:7],
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "parameter": lambda weight: nn.Parameter(weight),
    "frozen parameter": lambda weight: nn.Parameter(weight, requires_grad=False),
    "clone": lambda weight: weight.clone(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "list": lambda weight: torch.tensor(weight.tolist()),
    "copy": copy.copy,
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "save": lambda weight: torch.load(_saved(weight), weights_only=True),
    "grad-tracking cast": lambda weight: weight.to(torch.float64),
    "cast without grad": lambda weight: torch.no_grad()(lambda: weight.to(torch.float64))() + 0,
    "channels": lambda weight: weight.view(2, 16, 4, 8).to(memory_format=torch.channels_last),
    "equal": lambda weight: weight == weight,
    "storage": lambda weight: torch.tensor(weight.untyped_storage().tolist()),
    "in place": lambda weight: torch.no_grad()(weight.mul_)(3),
    "copy into": lambda weight: torch.zeros(32, 32).copy_(weight),
    "svd": lambda weight: torch.linalg.svdvals(weight),
    "inference": lambda weight: torch.inference_mode()(lambda: weight * 2)().clone(),
}


def _saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_touching_reads(launched, folder, monkeypatch, touch):
    model, plain = AutoModelForCausalLM.from_pretrained(folder), stock(folder, monkeypatch)
    weight = model.get_parameter(WEIGHT)
    result, expected = touch(weight), touch(plain.get_parameter(WEIGHT))
    assert not isinstance(result, DeferredTensor)
    assert (type(result), result.dtype, result.requires_grad) == (
        type(expected),
        expected.dtype,
        expected.requires_grad,
    )
    assert torch.equal(result, expected)
    if type(weight) is nn.Parameter:
        assert model.get_parameter(WEIGHT) is weight and torch.equal(weight, plain.get_parameter(WEIGHT))
        (weight.sum() * 2).backward()
        assert torch.equal(weight.grad, torch.full((32, 32), 2.0))
    assert_equal(model, plain)


def test_what_is_put_in_its_place_is_not_read(launched, folder):
    weight = AutoModelForCausalLM.from_pretrained(folder).get_parameter(WEIGHT)
    (folder / "model.safetensors").rename(folder / "away")
    weight.data = torch.ones(2, 2)
    (folder / "away").rename(folder / "model.safetensors")
    assert type(weight) is nn.Parameter and torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("family", BUILDERS)
def test_every_family(launched, tmp_path, monkeypatch, family):
    built = build_family(family)
    built.save_pretrained(tmp_path, max_shard_size="50KB")

    def load(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        torch.manual_seed(6)
        return type(built).from_pretrained(tmp_path, output_loading_info=True, dtype=torch.bfloat16)

    model, loading = load()
    plain, expected = load(EXPERTMESH_DEFERRED_LOAD="0")
    if family in FAMILIES:
        assert len(deferred(model)) == len(list(model.parameters()))
    assert loading == expected
    assert [str(c) for c in model._weight_conversions] == [str(c) for c in plain._weight_conversions]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    for (name, buffer), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert buffer.dtype == other.dtype and torch.equal(buffer, other), name
    assert_equal(model, plain)


class Doubled(ConversionOps):
    """Computes; with `looks`, in a way that depends on the elements."""

    def __init__(self, looks=False):
        self.looks = looks

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        ((tensor,),) = input_dict.values()
        factor = 2 if not self.looks or tensor.sum().item() < 1e9 else 3
        return {target_patterns[0]: tensor * factor}

    @property
    def reverse_op(self):
        raise NotImplementedError


@pytest.mark.parametrize("looks", [False, True], ids=["computed", "computed by its elements"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conversions_that_compute(launched, folder, monkeypatch, looks, dtype):
    mapping = modeling_utils.get_model_conversion_mapping

    def with_ours(*args, **kwargs):
        return [
            WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Doubled(looks)]),
            *mapping(*args),
        ]

    monkeypatch.setattr(modeling_utils, "get_model_conversion_mapping", with_ours)
    model, plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), stock(folder, monkeypatch, dtype=dtype)
    assert (WEIGHT in deferred(model)) != looks
    model.to(torch.float16), plain.to(torch.float16)
    assert torch.equal(plain.get_parameter(WEIGHT), (build().get_parameter(WEIGHT).to(dtype) * 2).half())
    assert_equal(model, plain)


CASTS = {
    "bf16": (torch.bfloat16,),
    "bf16, float": (torch.bfloat16, torch.float32),
    "half, bf16, float": (torch.float16, torch.bfloat16, torch.float32),
    "bf16, half, float": (torch.bfloat16, torch.float16, torch.float32),
    "double, half": (torch.float64, torch.float16),
}


@pytest.mark.parametrize("casts", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=lambda dtype: f"stored {dtype}")
def test_every_conversion_counts(launched, tmp_path, monkeypatch, stored, dtype, casts):
    build(num_hidden_layers=1).to(stored).save_pretrained(tmp_path)
    model, plain = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype),
        stock(tmp_path, monkeypatch, dtype=dtype),
    )
    for cast in casts:
        model.to(cast), plain.to(cast)
    assert_equal(model, plain)


def test_a_missing_layer_is_reported_and_initialised_as_ever(launched, tmp_path, monkeypatch):
    build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1." not in name}
    kept["lm_head.weight"] = torch.ones(7, 32)
    kept["stranger"] = torch.ones(2)
    save_file(kept, file, metadata={"format": "pt"})

    def load(**how):
        reports = io.StringIO()
        handler = logging.StreamHandler(reports)
        logging.getLogger("transformers").addHandler(handler)
        torch.manual_seed(3)
        model, loading = how.pop("how")(tmp_path, ignore_mismatched_sizes=True, output_loading_info=True, **how)
        logging.getLogger("transformers").removeHandler(handler)
        return model, loading, reports.getvalue(), torch.rand(1)

    model, loading, report, random = load(how=AutoModelForCausalLM.from_pretrained)
    plain, *expected = load(how=stock, monkeypatch=monkeypatch)
    assert any("layers.1" in name for name in loading["missing_keys"]) and loading["unexpected_keys"] == {"stranger"}
    assert [loading, report, random] == expected
    assert WEIGHT in deferred(model) and WEIGHT.replace("0", "1") not in deferred(model)
    assert_equal(model, plain)


@pytest.mark.parametrize("both", [False, True], ids=["one stored", "both stored"])
def test_tied_embeddings(launched, tmp_path, monkeypatch, both):
    build(tie_word_embeddings=True).save_pretrained(tmp_path)
    if both:
        file = tmp_path / "model.safetensors"
        stored = load_file(file)
        save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file)
    model, plain = AutoModelForCausalLM.from_pretrained(tmp_path), stock(tmp_path, monkeypatch)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert both or isinstance(model.lm_head.weight, DeferredParameter)
    model.to(torch.bfloat16), plain.to(torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model, plain)


def test_resized_embeddings(launched, folder, monkeypatch):
    models = AutoModelForCausalLM.from_pretrained(folder), stock(folder, monkeypatch)
    for model in models:
        torch.manual_seed(4)
        model.resize_token_embeddings(101)
    assert WEIGHT in deferred(models[0])
    assert_equal(*models)


def test_a_forward_before_anything_else(launched, folder, monkeypatch):
    models = AutoModelForCausalLM.from_pretrained(folder), stock(folder, monkeypatch)
    rows = batches(1, 2, 6)[0]
    losses = [model(input_ids=rows, labels=rows).loss for model in models]
    assert torch.equal(*losses) and not deferred(models[0])
    generated = [model.generate(rows[:, :3], max_new_tokens=4, do_sample=False) for model in models]
    assert torch.equal(*generated)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


ADAPTERS = {
    "lora": dict(),
    "gaussian": dict(init_lora_weights="gaussian"),
    "dora": dict(use_dora=True),
    "pissa": dict(init_lora_weights="pissa"),
    "head saved": dict(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_start_with_the_same_values(launched, folder, monkeypatch, options, dtype):
    models = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), stock(folder, monkeypatch, dtype=dtype)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
    adapted = []
    for model in models:
        torch.manual_seed(5)
        adapted.append(peft.get_peft_model(model, copy.deepcopy(config)))
    if options in ({}, ADAPTERS["gaussian"]):
        assert len(deferred(models[0])) == len(list(stock(folder, monkeypatch).parameters()))
    assert [p.requires_grad for p in adapted[0].parameters()] == [p.requires_grad for p in adapted[1].parameters()]
    assert_equal(*adapted)


@pytest.mark.parametrize("environment", [dict(WORLD_SIZE="1"), dict(EXPERTMESH_DEFERRED_LOAD="0")], ids=str)
def test_other_jobs_load_as_ever(launched, folder, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not deferred(model)
    assert_equal(model, build())


def test_weights_that_are_given_are_taken(launched):
    model = build()
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert not deferred(loaded)
    assert_equal(loaded, model)


def test_other_files_and_dense_models(launched, tmp_path):
    model = build()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not deferred(loaded)
    assert_equal(loaded, model)
    dense = build(num_hidden_layers=1, mlp_only_layers=[0])
    dense.save_pretrained(tmp_path / "dense")
    assert not deferred(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))


@pytest.mark.parametrize("how", ["removed", "replaced", "written to"])
def test_a_file_that_changed_is_refused(launched, tmp_path, how):
    build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    if how == "removed":
        file.unlink()
    elif how == "replaced":
        file.rename(tmp_path / "old")
        file.write_bytes(content)
    else:
        with file.open("r+b") as opened:
            os.pwrite(opened.fileno(), b"x", len(content) - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed or removed after from_pretrained"):
        model.lm_head.weight.sum()
