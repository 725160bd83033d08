"""Losses without logits equal those of logits, whoever asks for them, and nobody who looks at logits misses them."""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec

import pytest
import torch
from expertmesh_plugins.transformers import loss as plugin
from peft import LoraConfig, get_peft_model
from processes import TESTS, run_command, run_ranks
from ranks.models import FAMILIES, VOCABULARY, build
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

from expertmesh import ExpertParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.loss import chunked, linear_cross_entropy, take_loss_without_logits

CPU = torch.device("cpu")
TOKENS, FEATURES, WORDS = 40, 32, 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of 256 words, so that every vocabulary here but the models' is cut."""
    monkeypatch.setattr(chunked, "PIECE_BYTES", 1)


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", ["some", "none", "all"])
def test_the_function_equals_cross_entropy(ignored, smoothing, bias):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, generator=generator, requires_grad=True)
    weight = (0.2 * torch.randn(WORDS, FEATURES, generator=generator)).requires_grad_()
    leaves = [hidden, weight]
    if bias:
        leaves.append(torch.randn(WORDS, generator=generator, requires_grad=True))
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    targets[{"some": slice(None, None, 3), "none": slice(0), "all": slice(None)}[ignored]] = -7
    options = dict(ignore_index=-7, label_smoothing=smoothing)
    operands = (hidden, weight, leaves[2] if bias else None)
    found = gradients(linear_cross_entropy(*operands, targets, **options) / 3, leaves)
    expected = gradients(F.cross_entropy(F.linear(*operands), targets, reduction="sum", **options) / 3, leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_no_tokens_give_zero_and_frozen_weights_no_gradient():
    hidden = torch.zeros(0, FEATURES, requires_grad=True)
    weight = torch.randn(WORDS, FEATURES)
    loss = linear_cross_entropy(hidden, weight, None, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss == 0 and hidden.grad.shape == hidden.shape and weight.grad is None


def test_bfloat16_is_no_worse_than_logits():
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for size in (TOKENS, WORDS)]
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)

    def outcome(loss, dtype):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in exact]
        return gradients(loss(*leaves), leaves)

    def of_logits(hidden, weight):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")

    rounded = [leaf.bfloat16().double() for leaf in exact]
    exact[:] = rounded
    true = outcome(of_logits, torch.float64)
    theirs = outcome(of_logits, torch.bfloat16)
    ours = outcome(lambda hidden, weight: linear_cross_entropy(hidden, weight, None, targets), torch.bfloat16)
    for mine, other, value in zip(ours, theirs, true, strict=True):
        assert (mine - value).norm() <= 1.05 * (other - value).norm() + 1e-6 * value.norm()


class Largest(TorchDispatchMode):
    """The most elements of any tensor whose last dimension is the vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.elements = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.shape[-1:] == (self.words,)
        ]
        self.elements = max([self.elements, *sizes])
        return result


def pair(family: str = "qwen3_moe", **options):
    """A model, and the same with the other loss, both in training."""
    torch.manual_seed(0)
    own = build(family, **options).train()
    lean = copy.deepcopy(own)
    take_loss_without_logits(lean, ExpertParallelConfig(ep_loss="chunked"), CPU)
    return own, lean


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 4:] = -100
    return {"input_ids": tokens, "labels": labels}


def backward(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    largest = max(value.abs().max() for value in theirs.values())
    for name, expected in theirs.items():
        assert (ours[name] - expected).abs().max() <= tolerance * expected.abs().max() + 1e-7 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)])
def test_every_familys_loss_and_gradients(family, items):
    own, lean = pair(family)
    inputs = batch() | ({} if items is None else {"num_items_in_batch": items})
    assert_same(backward(lean, **inputs), backward(own, **inputs))


def test_logits_of_a_batch_are_never_made():
    own, lean = pair(vocab_size=4096)
    inputs = batch()
    with Largest(4096) as theirs:
        backward(own, **inputs)
    with Largest(4096) as ours:
        backward(lean, **inputs)
    assert theirs.elements >= 27 * 4096 and ours.elements == 0


def test_tied_embeddings_and_the_models_own_balancing_loss():
    options = dict(tie_word_embeddings=True, output_router_logits=True, router_aux_loss_coef=0.1)
    own, lean = pair(**options)
    assert_same(backward(lean, **batch()), backward(own, **batch()))


def test_whoever_looks_at_logits_gets_them_with_their_derivative():
    own, lean = pair()
    ours, theirs = (model(**batch()) for model in (lean, own))
    assert ours.logits.shape == theirs.logits.shape and ours.logits.dtype == theirs.logits.dtype
    assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
    assert torch.equal(ours.logits.float()[..., :-1, :].contiguous(), theirs.logits.float()[..., :-1, :])
    found, expected = (
        torch.autograd.grad(out.logits.square().mean() + out.loss, model.lm_head.weight)[0]
        for out, model in ((ours, lean), (theirs, own))
    )
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_evaluation_generation_and_training_without_labels_have_ordinary_logits():
    _, lean = pair()
    inputs = batch()
    assert type(lean(input_ids=inputs["input_ids"]).logits) is torch.Tensor
    lean.eval()
    assert type(lean(**inputs).logits) is torch.Tensor
    assert lean.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False).shape == (3, 11)


def test_autocast_rounds_as_it_would_logits():
    own, lean = pair()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (model(**batch()).loss for model in (lean, own))
    assert abs(ours - theirs) <= 1e-3 * theirs


@pytest.mark.parametrize("targets", [["q_proj"], ["lm_head", "q_proj"]])
def test_with_adapters(targets):
    own, lean = (build("qwen3_moe", vocab_size=4096) for _ in range(2))
    models = []
    for model in (own, lean):
        torch.manual_seed(0)
        models.append(get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False)).train())
    take_loss_without_logits(models[1], ExpertParallelConfig(), CPU)
    changed = "forward" in models[1].get_output_embeddings().__dict__
    assert changed == ("lm_head" not in targets), "an adapted head keeps its own forward"
    theirs = backward(models[0], **batch())
    with Largest(4096) as seen:
        assert_same(backward(models[1], **batch()), theirs)
    assert (seen.elements == 0) == changed


@pytest.mark.parametrize("aux", [False, True])
def test_trainers_label_smoothing(tmp_path, aux, monkeypatch):
    monkeypatch.setattr(Trainer, "compute_loss", Trainer.compute_loss)
    plugin.patch_trainer()
    options = dict(output_router_logits=aux, router_aux_loss_coef=0.1)
    outcomes = []
    for model in pair(**options):
        arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.2, use_cpu=True, report_to=[])
        trainer = Trainer(model, arguments)
        model.train().zero_grad()
        loss = trainer.compute_loss(model, batch(), num_items_in_batch=torch.tensor(13))
        loss.backward()
        assert trainer.label_smoother is not None
        outcomes.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    assert_same(*reversed(outcomes))


def test_what_has_another_loss_or_asks_for_its_own_is_left_alone():
    model = build("qwen3_moe")
    take_loss_without_logits(model, ExpertParallelConfig(ep_loss="hf"), CPU)
    assert "forward" not in model.lm_head.__dict__
    model.loss_function = lambda **kwargs: kwargs["logits"].mean()
    take_loss_without_logits(model, ExpertParallelConfig(), CPU)
    assert "forward" not in model.lm_head.__dict__


def test_liger_is_refused_where_it_cannot_be():
    with pytest.raises(ConfigError, match="ep_loss liger needs CUDA and the package liger-kernel, and here is cpu"):
        take_loss_without_logits(build("qwen3_moe"), ExpertParallelConfig(ep_loss="liger"), CPU)


def test_under_fsdp2_which_frees_the_heads_weight():
    run_ranks(TESTS / "ranks" / "loss.py", 2, env={"ACCELERATE_USE_CPU": "true"})


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed (extra `liger`)")
def test_ligers_kernels_compute_the_same():
    program = TESTS / "ranks" / "liger_loss.py"
    finished = run_command([sys.executable, program], env={"TRITON_INTERPRET": "1"}, timeout=120)
    assert finished.returncode == 0, finished.output
