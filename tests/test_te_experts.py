"""`ep_compute: te` against `loop`, on the emulation of Transformer Engine, for every layout that it does not refuse.

float32, relative error 1e-5 of the output and of every gradient (tokens, routing weights, parameters). With 8 bits: the
error that 8 bits make, and nothing from rows that only fill up.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from emulation import te_device, te_recipe
from emulation.install import installed
from expertmesh_plugins.transformer_engine.experts import TransformerEngineExperts
from processes import TESTS, run_ranks
from ranks.families import BUILDERS, build_family
from test_compute import (
    LAYOUTS,
    TOKENS,
    TOP_K,
    Collapse,
    Expand,
    assert_close,
    from_model,
    gradients,
    low_rank,
    merged,
    routing,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertmesh.compute.by_gemm import Loop
from expertmesh.compute.normed import normed_experts
from expertmesh.compute.projection import ProjectionTensors
from expertmesh.compute.routed import ExpertTensors
from expertmesh.compute.select import choose_compute
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec, is_experts

REFUSED = ("gpt_oss", "aria")
TAKEN = [layout for layout in LAYOUTS if layout not in REFUSED]
CPU = torch.device("cpu")
RECIPES = {"float8_current_scaling": te_recipe.Float8CurrentScaling(), "mxfp8": te_recipe.MXFP8BlockScaling()}


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(te_device, "ALLOW_CPU", True)
    monkeypatch.setattr(te_device, "CAPABILITY", (10, 0))
    with installed("te") as package:
        yield package


def tensors_of(experts):
    return ExpertTensors.of(*(getattr(experts, name) for name in ExpertsSpec.of(experts).parameter_names))


def run(experts, hidden, index, weights, scale=1.0, tensors=None):
    spec = ExpertsSpec.of(experts)
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    operands = (tensors or tensors_of(experts), dispatched.tokens, dispatched.row_weights, dispatched.rows)
    return compute(experts, operands, scale)


def compute(experts, operands, scale=1.0):
    spec = ExpertsSpec.of(experts)
    computed = TransformerEngineExperts(experts, spec, scale)
    if spec.has_post_expert_norm:
        return normed_experts(computed, *operands, experts.post_expert_norm)
    return computed(*operands)


def tokens_for(experts):
    up = getattr(experts, ExpertsSpec.of(experts).up_name)
    return torch.randn(TOKENS, up.shape[2], generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["even", "one-expert", "few-experts"])
@pytest.mark.parametrize("layout", TAKEN)
def test_equals_the_models_own_forward(layout, kind):
    experts, (index, weights) = LAYOUTS[layout](), routing(kind)
    hidden = tokens_for(experts)
    experts.config._experts_implementation = "eager"
    expected = gradients(experts, experts, hidden, index, weights)
    assert_close(gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights), expected)


@pytest.mark.parametrize("family", [family for family in BUILDERS if family not in LAYOUTS])
def test_equals_the_models_own_forward_in_every_family(family):
    index, weights = routing("few-experts")
    for experts in filter(is_experts, build_family(family).modules()):
        spec = ExpertsSpec.of(experts)
        if spec.is_transposed:
            reason = TransformerEngineExperts.refusal(experts, spec, torch.float32, CPU)
            assert "set ep_compute to auto" in reason
            continue
        hidden = tokens_for(experts)
        experts.config._experts_implementation = "eager"
        expected = gradients(experts, experts, hidden, index, weights)
        assert_close(
            gradients(experts, lambda *inputs, own=experts: run(own, *inputs), hidden, index, weights), expected
        )


@pytest.mark.parametrize("layout", ["qwen3_moe", "nemotron_h", "muse_spark"])
def test_the_gradients_of_parameters_alone_are_scaled(layout):
    experts, (index, weights) = LAYOUTS[layout](), routing("even")
    hidden = tokens_for(experts)
    whole = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    scaled = gradients(experts, lambda *inputs: run(experts, *inputs, scale=0.25), hidden, index, weights)
    names = ExpertsSpec.of(experts).parameter_names
    assert_close(scaled, {name: value * 0.25 if name in names else value for name, value in whole.items()})


def test_no_tokens_give_zero_gradients_and_stay_connected():
    experts = from_model("qwen3_moe")
    hidden, index, weights = torch.zeros(0, 32), torch.zeros(0, TOP_K, dtype=torch.long), torch.zeros(0, TOP_K)
    found = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    assert found["output"].shape == (0, 32)
    assert all(not value.any() for value in found.values())


def test_biases_are_weighted_too(engine):
    experts, (index, weights) = wide(), routing("even")
    spec = replace(ExpertsSpec.of(experts), has_bias=True)
    up, down = experts.gate_up_proj, experts.down_proj
    biases = [torch.randn(8, weight.shape[1], requires_grad=True) for weight in (up, down)]
    hidden, weights = tokens_for(experts).requires_grad_(), weights.requires_grad_()
    dispatched = LocalDispatcher(8).dispatch(hidden, index, weights)
    operands = (ExpertTensors.of(up, down, *biases), dispatched.tokens, dispatched.row_weights, dispatched.rows)

    def outcome(kind):
        output = kind(experts, spec, 0.5)(*operands)
        mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        return output, *torch.autograd.grad(mixed, [hidden, weights, up, down, *biases], retain_graph=True)

    exact = outcome(Loop)
    for found, truth in zip(outcome(TransformerEngineExperts), exact, strict=True):
        assert (found - truth).abs().max() <= 1e-5 * truth.abs().max()
    with engine.autocast(recipe=RECIPES["mxfp8"]):
        rounded = outcome(TransformerEngineExperts)
    for found, truth in zip(rounded, exact, strict=True):
        assert (found - truth).norm() < 0.1 * truth.norm()


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("which", ["up", "down", "both"])
@pytest.mark.parametrize("layout", ["qwen3_moe", "nemotron_h", "muse_spark"])
def test_low_rank_adapters_are_a_sum_that_is_never_built(layout, which, rank):
    experts = LAYOUTS[layout]().requires_grad_(False)
    whole = tensors_of(experts)
    adapters = {
        name: low_rank(getattr(whole, name).weight, False, rank, seed)
        for seed, name in enumerate(("up", "down"))
        if which in (name, "both")
    }
    leaves = [leaf for adapter in adapters.values() for leaf in (adapter.a, adapter.b)]
    index, weights = routing("even")
    hidden, weights = tokens_for(experts).requires_grad_(), weights.requires_grad_()

    def outcome(projections):
        output = run(experts, hidden, index, weights, tensors=ExpertTensors(**projections))
        mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        return output.detach(), *torch.autograd.grad(mixed, [hidden, weights, *leaves])

    def projections(with_adapter):
        return {
            name: with_adapter(getattr(whole, name), adapters[name]) if name in adapters else getattr(whole, name)
            for name in ("up", "down")
        }

    ours = outcome(projections(lambda base, adapter: ProjectionTensors(base.weight, base.bias, adapter)))
    expected = outcome(
        projections(lambda base, adapter: ProjectionTensors(merged(base.weight, adapter, False), base.bias))
    )
    for found, truth in zip(ours, expected, strict=True):
        assert (found - truth).abs().max() <= 1e-5 * truth.abs().max()


def run_on_rows(experts, hidden, index, weights, counts_on_host=False):
    """On rows as an engine brings them: each expert's filled up, and NaN behind the last."""
    spec = ExpertsSpec.of(experts)
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    counts = torch.tensor(dispatched.rows.rows_per_expert)
    padded = (counts + 7) // 8 * 8
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    slots = torch.arange(dispatched.rows.num_rows) + shift.repeat_interleave(counts)
    num_used = int(padded.sum())
    token_index = dispatched.rows.token_index
    rows, row_weights = Expand.apply(hidden, dispatched.row_weights, token_index, slots, num_used + 24, num_used)
    plan = ExpertRows(None, padded.tolist() if counts_on_host else None, padded.cumsum(0).int(), num_used + 24)
    results = compute(experts, (tensors_of(experts), rows, row_weights, plan))
    return Collapse.apply(results, token_index, slots, hidden.shape[0], num_used)


@pytest.mark.parametrize("counts_on_host", [True, False])
@pytest.mark.parametrize("layout", ["qwen3_moe", "nemotron_h", "muse_spark"])
def test_padded_rows_and_what_lies_behind_them_change_nothing(layout, counts_on_host):
    experts, (index, weights) = LAYOUTS[layout](), routing("few-experts")
    hidden = tokens_for(experts)
    expected = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    assert_close(
        gradients(experts, lambda *inputs: run_on_rows(experts, *inputs, counts_on_host), hidden, index, weights),
        expected,
    )


def test_bf16_tokens_with_float32_weights_accumulate_in_float32():
    experts, (index, weights) = from_model("qwen3_moe"), routing("even")
    hidden = tokens_for(experts)
    exact = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    rounded = gradients(experts, lambda *inputs: run(experts, *inputs).float(), hidden.bfloat16(), index, weights)
    assert rounded["gate_up_proj"].dtype == torch.float32
    assert rounded["hidden"].dtype == torch.bfloat16
    # bf16 keeps 8 bits: an error of a few 2^-8 on every operand of two chained products.
    assert_close(rounded, exact, tolerance=0.03)


def wide():
    """Experts whose dimensions suit every recipe."""
    experts = from_model("qwen3_moe")
    for name, shape in (("gate_up_proj", (8, 128, 32)), ("down_proj", (8, 32, 64))):
        setattr(experts, name, torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.2))
    return experts


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", [run, run_on_rows])
@pytest.mark.parametrize("kind", ["even", "one-expert"])
def test_8_bits_make_their_error_and_no_other(engine, recipe, run, kind):
    experts, (index, weights) = wide(), routing(kind)
    hidden = tokens_for(experts)
    exact = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    with engine.autocast(recipe=RECIPES[recipe]):
        rounded = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    for name, value in exact.items():
        error = (rounded[name] - value).norm() / value.norm()
        # Operands have three bits behind the point, gradients of the HYBRID format two; two products follow each other.
        assert 0.01 < error < 0.15, f"{name}: {error}"
    again = gradients(experts, lambda *inputs: run(experts, *inputs), hidden, index, weights)
    assert all(torch.equal(again[name], value) for name, value in exact.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_have_no_part_in_8_bits(engine, recipe):
    experts = wide().requires_grad_(False)
    base = tensors_of(experts)
    adapter = low_rank(base.up.weight, False, 4, 0)
    adapted = ExpertTensors(ProjectionTensors(base.up.weight, None, adapter), base.down)
    index, weights = routing("even")
    hidden = tokens_for(experts)
    with engine.autocast(recipe=RECIPES[recipe]):
        found = run(experts, hidden, index, weights, tensors=adapted)
        without = run(experts, hidden, index, weights)
    exact, plain = run(experts, hidden, index, weights, tensors=adapted), run(experts, hidden, index, weights)
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.1
    assert (without - plain).norm() < (found - without).norm()


class Storages(TorchDispatchMode):
    """Notes what is allocated, to say how much of it is still there."""

    def __init__(self, parameters):
        super().__init__()
        self.sizes = {}
        self.parameters = {parameter.untyped_storage()._cdata for parameter in parameters}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.parameters:
                    self.sizes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def num_bytes(self):
        return sum(size for storage, size in self.sizes.values() if not storage.expired())


@pytest.mark.parametrize("recipe", [None, "float8_current_scaling"])
def test_it_keeps_for_backward_what_loop_keeps(engine, recipe):
    experts, (index, weights) = wide(), routing("even")
    tokens, spec = tokens_for(experts).requires_grad_(), ExpertsSpec.of(experts)
    dispatched = LocalDispatcher(8).dispatch(tokens, index, weights)
    operands = (tensors_of(experts), dispatched.tokens, dispatched.row_weights, dispatched.rows)

    def kept(kind):
        computed = kind(experts, spec, 1.0)
        with Storages(experts.parameters()) as storages:
            output = computed(*operands)
        del computed
        return storages.num_bytes, output

    with engine.autocast(enabled=recipe is not None, recipe=RECIPES.get(recipe)):
        ours, output = kept(TransformerEngineExperts)
    theirs, _ = kept(Loop)
    num_rows, padded = TOKENS * TOP_K, sum(-(-count // 16) * 16 for count in dispatched.rows.rows_per_expert)
    # The up projection's output, and a few integers a row.
    few = 64 * num_rows + 4096
    assert ours <= theirs * (1 if recipe is None else padded / num_rows) + few
    assert not torch.isnan(torch.autograd.grad(output.sum(), tokens)[0]).any()


def test_models_train_like_one_process():
    rank_0, *_ = run_ranks(TESTS / "ranks" / "te_experts.py", 2)
    results = json.loads(rank_0.stdout.splitlines()[-1])
    rounded = {name for name in results if name.endswith("in 8 bits")}
    bf16 = results.pop("bf16")
    assert len(results) == 17 and len(rounded) == 3
    beyond = {
        f"{name}, {what}": error
        for name in results.keys() - rounded
        for what, error in results[name].items()
        if not error <= 1e-5
    }
    assert not beyond
    # No further from float32 than one process that computes in bfloat16.
    assert bf16["loss"] < 1e-3 and bf16["gradient"] <= 1.1 * bf16["one_bf16_process"]
    assert all(1e-4 < results[name]["loss"] < 1e-2 and results[name]["norm"] < 0.03 for name in rounded)
    assert results["recomputed in 8 bits"] == results["trained in 8 bits"]


def test_it_refuses_by_name_what_it_cannot_compute(engine, monkeypatch):
    for layout, make in LAYOUTS.items():
        experts = make()
        reason = TransformerEngineExperts.refusal(experts, ExpertsSpec.of(experts), torch.float32, CPU)
        assert (reason is not None) == (layout in REFUSED)
        assert reason is None or (type(experts).__name__ in reason and "set ep_compute to auto" in reason)
    experts = from_model("qwen3_moe")
    spec = ExpertsSpec.of(experts)
    assert "set mixed_precision to bf16" in TransformerEngineExperts.refusal(experts, spec, torch.float64, CPU)
    monkeypatch.setattr(te_device, "ALLOW_CPU", False)
    with pytest.raises(ConfigError, match="ep_compute te cannot be used here: Transformer Engine computes on cuda"):
        choose_compute("te", experts, spec, torch.float32, CPU, counts_on_host=True)
    assert "computes on cuda, not on cpu" in TransformerEngineExperts.refusal(experts, spec, torch.float32, CPU)


def test_dimensions_that_a_recipe_does_not_take_are_refused(engine):
    experts, (index, weights) = from_model("qwen3_moe"), routing("even")
    with (
        engine.autocast(recipe=RECIPES["mxfp8"]),
        pytest.raises(ConfigError, match="takes multiples of 32: set ep_comp"),
    ):
        run(experts, tokens_for(experts), index, weights)


def test_where_it_is_not_installed_it_says_how_to_get_it(monkeypatch):
    experts = from_model("qwen3_moe")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    reason = TransformerEngineExperts.refusal(experts, ExpertsSpec.of(experts), torch.float32, CPU)
    assert "transformer_engine cannot be imported" in reason and "pip install" in reason


def test_weights_are_borrowed_and_given_back():
    experts, (index, weights) = from_model("qwen3_moe"), routing("even")
    compute = TransformerEngineExperts(experts, ExpertsSpec.of(experts), 1.0)
    dispatched = LocalDispatcher(8).dispatch(tokens_for(experts), index, weights)
    compute(tensors_of(experts), dispatched.tokens, dispatched.row_weights, dispatched.rows)
    held = [tensor for one in (compute._up, compute._down) for tensor in one._base._module.parameters()]
    assert held and all(tensor.device.type == "meta" for tensor in held)
