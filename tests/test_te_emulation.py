"""The emulation of Transformer Engine: it is called and behaves as the snapshot of 2.20.2 says, computes what it
should, and refuses what the real one refuses or gets wrong without a word.

`test_te_fidelity.py` holds the snapshot to the real one.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from emulation import te, te_device, te_quantization, te_recipe
from emulation.errors import EmulationError
from emulation.install import installed
from emulation.signatures import snapshot
from emulation.te_gemm import assert_dim_for_fp8_exec
from te_fidelity.facts import facts, signatures
from torch.nn import functional as F

SAID = snapshot("te_2.20.2")
CURRENT, MX = te_recipe.Float8CurrentScaling(), te_recipe.MXFP8BlockScaling()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(te_device, "ALLOW_CPU", True)


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(te_device, "CAPABILITY", (10, 0))


def test_it_is_called_as_the_real_one():
    assert json.loads(json.dumps(signatures(te, te_recipe))) == SAID["signatures"]


def test_it_behaves_as_the_real_one_where_no_kernel_runs():
    found = json.loads(json.dumps(facts(te, te_recipe, te_quantization, assert_dim_for_fp8_exec)))
    for name, said in SAID["facts"].items():
        assert found[name] == said, name


def test_it_is_imported_by_the_real_names():
    with installed("te") as package:
        import transformer_engine.pytorch as pytorch
        from transformer_engine.common.recipe import Float8CurrentScaling
        from transformer_engine.pytorch.ep import EpBuffer

        assert package.__version__ == "2.20.2" and pytorch.Linear is te.Linear
        assert Float8CurrentScaling is te_recipe.Float8CurrentScaling and EpBuffer.__module__ == "emulation.te_ep"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu_unless_a_test_says_otherwise(monkeypatch):
    linear, norm = te.Linear(16, 16, device="cpu"), te.RMSNorm(16, device="cpu")
    monkeypatch.setattr(te_device, "ALLOW_CPU", False)
    with pytest.raises(RuntimeError, match=r"^TransformerEngine needs CUDA\.$"):
        te.Linear(16, 16, device="meta")
    for module in (linear, norm):
        with pytest.raises(RuntimeError, match=r"needs CUDA\. Got input on device: cpu"):
            module(torch.zeros(2, 16))
    with pytest.raises(ValueError, match="inp must be a CUDA tensor"):
        te.moe_permute(torch.zeros(2, 16), torch.ones(2, 4), 8)


def test_linear_multiplies_in_the_dtype_of_the_activations():
    linear, x = te.Linear(32, 16, device="cpu"), torch.randn(2, 3, 32)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"Found input dtype: .*bfloat16 and 'weight' dtype: .*float32"):
        linear(x.bfloat16())
    with pytest.raises(EmulationError, match="is_first_microbatch is no tensor"):
        linear(x, linear.bias)


def test_rms_norm_multiplies_in_float32_and_casts_to_its_weight():
    norm = te.RMSNorm(32, eps=1e-6, device="cpu", dtype=torch.bfloat16, zero_centered_gamma=True)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(4, 32)
    exact = F.rms_norm(x.bfloat16().float(), (32,), 1 + norm.weight.float(), 1e-6).bfloat16()
    assert torch.equal(norm(x), exact)


def test_grouped_linear_multiplies_each_split_with_its_own():
    grouped = te.GroupedLinear(3, 32, 16, device="cpu")
    x = torch.randn(10, 32, requires_grad=True)
    result = grouped(x, [4, 0, 6])
    expected = torch.cat(
        [F.linear(x[:4], grouped.weight0, grouped.bias0), F.linear(x[4:], grouped.weight2, grouped.bias2)]
    )
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert not grouped.weight1.grad.any() and grouped.weight2.grad.any()
    with pytest.raises(EmulationError, match="a second backward"):
        total = grouped(x, [4, 0, 6]).sum()
        total.backward(retain_graph=True)
        total.backward()
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        grouped(x, torch.tensor([4, 0, 5]))


@pytest.mark.parametrize(("recipe", "bits"), [(CURRENT, 3), (MX, 3)])
def test_8_bits_leave_the_error_of_8_bits(recipe, bits, blackwell):
    linear = te.Linear(64, 32, bias=False, device="cpu")
    x = torch.randn(64, 64, requires_grad=True)
    grad = torch.randn(64, 32)

    def run():
        y = linear(x)
        return y.detach(), *torch.autograd.grad(y, [x, linear.weight], grad)

    exact = run()
    with te.autocast(recipe=recipe):
        rounded = run()
    for found, truth in zip(rounded, exact, strict=True):
        error = (found - truth).norm() / truth.norm()
        # Three bits behind the point, two of gradients of the HYBRID format: much more than bfloat16's seven.
        assert 2.0 ** -(bits + 3) < error < 2.0**-bits, error


def test_scales_are_of_a_tensor_or_of_a_block_along_the_sum(blackwell):
    x = torch.ones(32, 64)
    x[0, 0] = 2.0**20
    x[1:, 1:] = 1.0625 * 2.0**-5
    whole = CURRENT.rounded(x, False, 1)
    assert not whole[1:, 1:].any() and whole[0, 0] == x[0, 0]
    rows, columns = MX.rounded(x, False, 1), MX.rounded(x, False, 0)
    # Only what shares a block with the largest is lost.
    assert not rows[0, 1:32].any() and rows[0, 32:].equal(x[0, 32:]) and rows[1:, 1:].any()
    assert not columns[1:, 0].any() and columns[:, 1:].any()


def test_8_bits_ask_for_aligned_rows(blackwell):
    grouped, x = te.GroupedLinear(2, 64, 32, bias=False, device="cpu"), torch.randn(48, 64)
    with te.autocast(recipe=CURRENT):
        grouped(x, [16, 32])
        with pytest.raises(EmulationError, match="no multiple of 16"):
            grouped(x, [8, 40])
    with te.autocast(recipe=MX), pytest.raises(EmulationError, match="no multiple of 32"):
        grouped(x, [16, 32])
    with te.autocast(recipe=CURRENT), pytest.raises(ValueError, match="FP8 execution requires"):
        te.Linear(64, 24, device="cpu")(x[:7])
    with te.autocast(recipe=te_recipe.DelayedScaling()), pytest.raises(EmulationError, match="earlier steps"):
        grouped(x, [16, 32])
    with pytest.raises(EmulationError, match="no explicit recipe"), te.autocast():
        pass


def test_what_goes_past_fsdp2_is_refused():
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        for module, sizes in ((te.Linear, (16, 16)), (te.GroupedLinear, (2, 16, 16))):
            with pytest.raises(EmulationError, match="past FSDP2"):
                module(*sizes, device="meta", **{option: True})


HEADS, GROUPS, DIM, LENGTH = 4, 2, 8, 11


def queries(batch=2, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, length, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]


def attend(q, k, v, visible, cap=0.0, sink=None):
    """Attention with a mask that is true where a query looks, in plain steps; `[batch, length, heads * dim]`."""
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / DIM**0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)


def causal(length=LENGTH, window=None):
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def attention(**options):
    return te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **{"qkv_format": "bshd", **options})


def test_attention_is_causal_by_default_and_knows_windows_caps_and_sinks():
    q, k, v = queries()
    torch.testing.assert_close(attention()(q, k, v), attend(q, k, v, causal()))
    # A window of Transformers counts the query itself.
    torch.testing.assert_close(attention(window_size=(3, 0))(q, k, v), attend(q, k, v, causal(window=4)))
    torch.testing.assert_close(attention(softcap=1.5)(q, k, v), attend(q, k, v, causal(), cap=1.5))
    with_sink = attention(softmax_type="learnable")
    torch.nn.init.normal_(with_sink.softmax_offset)
    torch.testing.assert_close(with_sink(q, k, v), attend(q, k, v, causal(), sink=with_sink.softmax_offset))
    torch.testing.assert_close(
        attention(softmax_type="off-by-one")(q, k, v), attend(q, k, v, causal(), sink=torch.zeros(HEADS))
    )
    by_sequence = attention(qkv_format="sbhd")(*(x.transpose(0, 1).contiguous() for x in (q, k, v)))
    torch.testing.assert_close(by_sequence.transpose(0, 1), attend(q, k, v, causal()))
    with pytest.raises(EmulationError, match="is ignored"):
        attention()(q, k, v, attention_mask=torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool))


def test_a_mask_is_true_where_nobody_looks():
    q, k, v = queries()
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [6]])
    padding = ~real.view(2, 1, 1, LENGTH)
    found = attention(attn_mask_type="padding_causal")(q, k, v, attention_mask=padding)
    expected = attend(q, k, v, causal() & ~padding)
    torch.testing.assert_close(found[real], expected[real])
    assert not found[~real].any()
    arbitrary = attention(attn_mask_type="arbitrary")(q, k, v, attention_mask=~causal(window=3))
    torch.testing.assert_close(arbitrary, attend(q, k, v, causal(window=3)))
    with pytest.raises(EmulationError, match="not on the right"):
        attention(attn_mask_type="padding_causal")(q, k, v, attention_mask=~padding)


def test_packed_sequences_do_not_see_each_other():
    q, k, v = (x.flatten(0, 1) for x in queries())
    ends = torch.tensor([0, 5, 5 + LENGTH, 2 * LENGTH], dtype=torch.int32)
    options = dict(qkv_format="thd", attn_mask_type="padding_causal")
    found = attention(**options)(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=16, max_seqlen_kv=16)
    alone = [attend(q[a:b][None], k[a:b][None], v[a:b][None], causal(b - a))[0] for a, b in pairwise(ends)]
    torch.testing.assert_close(found, torch.cat(alone))
    with pytest.raises(AssertionError, match=r"must be torch.int32"):
        attention(**options)(q, k, v, cu_seqlens_q=ends.long(), cu_seqlens_kv=ends.long())
    with pytest.raises(AssertionError, match="must be padding or padding_causal"):
        attention(qkv_format="thd")(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    with pytest.raises(EmulationError, match="do not cover all tokens"):
        attention(**options)(q, k, v, cu_seqlens_q=ends[:-1], cu_seqlens_kv=ends[:-1])


def test_padding_of_rows_and_back():
    rows, padding, unpadding = torch.randn(10, 8), te.Fp8Padding(3, 4), te.Fp8Unpadding(3, 4)
    padded, sizes = padding(rows, [3, 0, 7])
    assert sizes == [4, 0, 8] and not padded[3].any() and not padded[11].any()
    assert torch.equal(unpadding(padded, [3, 0, 7]), rows)
