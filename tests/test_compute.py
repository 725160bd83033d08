"""The hand-written experts against the model's own eager forward, for every layout a family of Transformers uses.

Both computes, float32, relative error 1e-5 of the output and of every gradient (tokens, routing weights, parameters).
"""

from __future__ import annotations

import pytest
import torch
from ranks.models import FAMILIES, build
from torch import nn
from transformers import AriaTextConfig, MuseSparkTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

from expertmesh.compute import choose_compute
from expertmesh.compute.by_gemm import Grouped, Loop
from expertmesh.compute.normed import normed_experts
from expertmesh.compute.projection import LowRank, ProjectionTensors
from expertmesh.compute.routed import ExpertTensors
from expertmesh.compute.select import COMPUTES
from expertmesh.dispatch.local import LocalDispatcher
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.errors import ConfigError
from expertmesh.experts import ExpertsSpec, find_experts

TOKENS, TOP_K = 40, 3


def from_model(family):
    return next(iter(find_experts(build(family)).values()))


def from_class(experts_class, config):
    torch.manual_seed(0)
    experts = experts_class(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


SIZES = dict(hidden_size=32, intermediate_size=24, moe_intermediate_size=24, num_experts_per_tok=2)
LAYOUTS = {
    **{family: lambda family=family: from_model(family) for family in FAMILIES},
    "aria": lambda: from_class(AriaExperts, AriaTextConfig(moe_num_experts=8, **SIZES)),
    "minimax_m3_vl": lambda: from_class(MiniMaxM3VLExperts, MiniMaxM3VLTextConfig(num_local_experts=8, **SIZES)),
    "muse_spark": lambda: from_class(
        MuseSparkExperts,
        MuseSparkTextConfig(
            num_local_experts=8, moe_hidden_size=32, num_attention_heads=2, num_key_value_heads=2, **SIZES
        ),
    ),
}


def run_ours(experts, name, hidden, index, weights):
    spec = ExpertsSpec.of(experts)
    compute = COMPUTES.find(name)(experts, spec, 1.0)
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    tensors = ExpertTensors.of(*(getattr(experts, parameter) for parameter in spec.parameter_names))
    operands = (tensors, dispatched.tokens, dispatched.row_weights, dispatched.rows)
    if spec.has_post_expert_norm:
        return normed_experts(compute, *operands, experts.post_expert_norm)
    return compute(*operands)


def gradients(experts, forward, hidden, index, weights):
    hidden, weights = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weights))
    output = forward(hidden, index, weights)
    leaves = {"hidden": hidden, "weights": weights, **dict(experts.named_parameters())}
    mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
    found = torch.autograd.grad(mixed, list(leaves.values()))
    return {"output": output.detach(), **dict(zip(leaves, found, strict=True))}


def assert_close(actual, expected, tolerance=1e-5):
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def routing(kind):
    generator = torch.Generator().manual_seed(3)
    index = torch.rand(TOKENS, 8, generator=generator).argsort(1)[:, :TOP_K]
    if kind == "one-expert":
        index = torch.full_like(index, 5)
    if kind == "few-experts":
        index = index % 3
    return index, torch.rand(TOKENS, TOP_K, generator=generator)


@pytest.mark.parametrize("compute", ["loop", "grouped_mm"])
@pytest.mark.parametrize("kind", ["even", "one-expert", "few-experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_models_own_forward(layout, kind, compute):
    experts = LAYOUTS[layout]()
    width = getattr(experts, ExpertsSpec.of(experts).up_name)
    features = width.shape[1] if experts.is_transposed else width.shape[2]
    hidden = torch.randn(TOKENS, features, generator=torch.Generator().manual_seed(2))
    index, weights = routing(kind)
    experts.config._experts_implementation = "eager"
    expected = gradients(experts, experts, hidden, index, weights)
    ours = gradients(experts, lambda *inputs: run_ours(experts, compute, *inputs), hidden, index, weights)
    assert_close(ours, expected)


@pytest.mark.parametrize("compute", ["loop", "grouped_mm"])
def test_no_tokens_give_zero_gradients_and_stay_connected(compute):
    experts = from_model("gpt_oss")
    hidden, index, weights = torch.zeros(0, 32), torch.zeros(0, TOP_K, dtype=torch.long), torch.zeros(0, TOP_K)
    found = gradients(experts, lambda *inputs: run_ours(experts, compute, *inputs), hidden, index, weights)
    assert found["output"].shape == (0, 32)
    assert all(not value.any() for value in found.values())


def low_rank(weight, is_transposed, rank, seed):
    num_experts, out, width = weight.transpose(1, 2).shape if is_transposed else weight.shape
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(num_experts, rank, width, generator=generator) * 0.2
    b = torch.randn(num_experts, out, rank, generator=generator) * 0.2
    return LowRank(a.requires_grad_(), b.requires_grad_(), scaling=1.5)


def merged(weight, adapter, is_transposed):
    delta = adapter.scaling * adapter.b @ adapter.a
    return weight + (delta.transpose(1, 2) if is_transposed else delta)


@pytest.mark.parametrize("compute", ["loop", "grouped_mm"])
@pytest.mark.parametrize("rank", [1, 4, 6])
@pytest.mark.parametrize("which", ["up", "down", "both"])
@pytest.mark.parametrize("layout", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark"])
def test_low_rank_adapters_are_a_sum_that_is_never_built(layout, which, rank, compute):
    experts = LAYOUTS[layout]().requires_grad_(False)
    spec = ExpertsSpec.of(experts)
    up, down, *biases = (getattr(experts, name) for name in spec.parameter_names)
    adapters = {
        name: low_rank(weight, spec.is_transposed, rank, seed)
        for seed, (name, weight) in enumerate({"up": up, "down": down}.items())
        if which in (name, "both")
    }
    leaves = [leaf for adapter in adapters.values() for leaf in (adapter.a, adapter.b)]
    index, weights = routing("even")
    hidden = torch.randn(TOKENS, up.shape[1] if spec.is_transposed else up.shape[2])
    hidden, weights = (tensor.requires_grad_() for tensor in (hidden, weights))
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    function = COMPUTES.find(compute)(experts, spec, 1.0)
    operands = (dispatched.tokens, dispatched.row_weights, dispatched.rows)

    def run(tensors):
        if spec.has_post_expert_norm:
            output = normed_experts(function, tensors, *operands, experts.post_expert_norm)
        else:
            output = function(tensors, *operands)
        mixed = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        return output.detach(), *torch.autograd.grad(mixed, [hidden, weights, *leaves], retain_graph=True)

    up_bias, down_bias = biases or (None, None)
    ours = run(
        ExpertTensors(
            ProjectionTensors(up, up_bias, adapters.get("up")), ProjectionTensors(down, down_bias, adapters.get("down"))
        )
    )
    whole = [
        merged(weight, adapters[name], spec.is_transposed) if name in adapters else weight
        for name, weight in (("up", up), ("down", down))
    ]
    expected = run(ExpertTensors.of(*whole, *biases))
    for found, truth in zip(ours, expected, strict=True):
        assert (found - truth).abs().max() <= 1e-5 * truth.abs().max()


def test_bf16_tokens_with_float32_weights_accumulate_in_float32():
    experts = from_model("qwen3_moe")
    index, weights = routing("even")
    hidden = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(2))
    exact = gradients(experts, lambda *inputs: run_ours(experts, "loop", *inputs), hidden, index, weights)
    rounded = gradients(
        experts, lambda *inputs: run_ours(experts, "loop", *inputs).float(), hidden.bfloat16(), index, weights
    )
    assert rounded["gate_up_proj"].dtype == torch.float32
    assert rounded["hidden"].dtype == torch.bfloat16
    # bf16 keeps 8 bits: an error of a few 2^-8 on every operand of two chained products.
    assert_close(rounded, exact, tolerance=0.03)


class Expand(torch.autograd.Function):
    """Rows as an engine brings them: padded with zeros to multiples of 8 an expert, and NaN behind the last."""

    @staticmethod
    def forward(ctx, tokens, row_weights, token_index, slots, num_rows, num_used):
        rows = tokens.new_zeros(num_rows, tokens.shape[1])
        rows[num_used:] = float("nan")
        rows[slots] = tokens[token_index]
        weights = row_weights.new_zeros(num_rows)
        weights[slots] = row_weights
        ctx.save_for_backward(token_index, slots)
        ctx.num_tokens = tokens.shape[0]
        return rows, weights

    @staticmethod
    def backward(ctx, grad_rows, grad_weights):
        token_index, slots = ctx.saved_tensors
        grad = grad_rows.new_zeros(ctx.num_tokens, grad_rows.shape[1])
        return grad.index_add_(0, token_index, grad_rows[slots]), grad_weights[slots], None, None, None, None


class Collapse(torch.autograd.Function):
    """The rows' results added up by token; the gradients come back padded like the rows."""

    @staticmethod
    def forward(ctx, results, token_index, slots, num_tokens, num_used):
        ctx.save_for_backward(token_index, slots)
        ctx.num_rows, ctx.num_used = results.shape[0], num_used
        return results.new_zeros(num_tokens, results.shape[1]).index_add_(0, token_index, results[slots])

    @staticmethod
    def backward(ctx, grad):
        token_index, slots = ctx.saved_tensors
        rows = grad.new_zeros(ctx.num_rows, grad.shape[1])
        rows[ctx.num_used :] = float("nan")
        rows[slots] = grad[token_index]
        return rows, None, None, None, None


def run_on_rows(experts, name, hidden, index, weights):
    spec = ExpertsSpec.of(experts)
    dispatched = LocalDispatcher(spec.num_experts).dispatch(hidden, index, weights)
    counts = torch.tensor(dispatched.rows.rows_per_expert)
    padded = (counts + 7) // 8 * 8
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    slots = torch.arange(dispatched.rows.num_rows) + shift.repeat_interleave(counts)
    num_used = int(padded.sum())
    token_index = dispatched.rows.token_index
    rows, row_weights = Expand.apply(hidden, dispatched.row_weights, token_index, slots, num_used + 24, num_used)
    plan = ExpertRows(None, padded.tolist() if name == "loop" else None, padded.cumsum(0).int(), num_used + 24)
    tensors = ExpertTensors.of(*(getattr(experts, parameter) for parameter in spec.parameter_names))
    function = COMPUTES.find(name)(experts, spec, 1.0)
    if spec.has_post_expert_norm:
        results = normed_experts(function, tensors, rows, row_weights, plan, experts.post_expert_norm)
    else:
        results = function(tensors, rows, row_weights, plan)
    return Collapse.apply(results, token_index, slots, hidden.shape[0], num_used)


@pytest.mark.parametrize("compute", ["loop", "grouped_mm"])
@pytest.mark.parametrize("kind", ["even", "one-expert", "few-experts"])
@pytest.mark.parametrize("layout", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark"])
def test_padded_rows_and_what_lies_behind_them_change_nothing(layout, kind, compute):
    experts = LAYOUTS[layout]()
    hidden = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(2))
    index, weights = routing(kind)
    expected = gradients(experts, lambda *inputs: run_ours(experts, compute, *inputs), hidden, index, weights)
    ours = gradients(experts, lambda *inputs: run_on_rows(experts, compute, *inputs), hidden, index, weights)
    assert_close(ours, expected)


def chosen(name, experts, dtype=torch.float32, device="cpu", counts_on_host=True):
    return choose_compute(name, experts, ExpertsSpec.of(experts), dtype, torch.device(device), counts_on_host)


def test_unknown_compute_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="auto or one of grouped_mm, loop, triton"):
        chosen("cutlass", from_model("qwen3_moe"))


def test_auto_takes_what_suits_the_device_and_what_the_dispatcher_says():
    experts = from_model("qwen3_moe")
    assert chosen("auto", experts) is Loop
    assert chosen("auto", experts, counts_on_host=False) is Grouped
    assert chosen("auto", experts, device="cuda") is Grouped
    assert chosen("auto", experts, device="cuda", dtype=torch.float64) is Loop


def test_triton_is_refused_where_its_kernels_do_not_run_and_for_another_gate():
    with pytest.raises(ConfigError, match="run on CUDA, and the experts are on cpu: set ep_compute to auto"):
        chosen("triton", from_model("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"GptOssExperts computes something else .*: set ep_compute to grouped_mm"):
        chosen("triton", from_model("gpt_oss"), device="cuda")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("loop", dict(counts_on_host=False), "set ep_compute to auto or grouped_mm"),
        ("grouped_mm", dict(dtype=torch.float64), "does not compute in torch.float64: set ep_compute to loop"),
    ],
)
def test_a_compute_that_cannot_do_it_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=f"ep_compute {name} cannot be used here: .*{message}"):
        chosen(name, from_model("qwen3_moe"), **options)


def test_matrices_that_grouped_mm_cannot_take_are_refused_by_their_shapes():
    experts = from_model("qwen3_moe")
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach()[..., :-2])
    with pytest.raises(ConfigError, match=r"multiples of 8 in torch.bfloat16; those of .*\(8, 32, 22\)"):
        chosen("grouped_mm", experts, dtype=torch.bfloat16)
