"""A loss without logits where FSDP2 shards the head: run by `test_loss.py`. Every rank asserts.

Accelerate frees the head's weight at the end of the forward, before the loss is differentiated and before a script
looks at logits.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from leaving import leave
from models import batches, build

from expertmesh import ExpertMeshConfig


def check(mixed_precision: str, tolerance: float, **options: object) -> None:
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    model = build("qwen3_moe", **options).train()
    whole = copy.deepcopy(model)
    accelerator = Accelerator(parallelism_config=ExpertMeshConfig(ep_size=2), mixed_precision=mixed_precision)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert "forward" in model.lm_head.__dict__
    tokens = batches(1, 4, 10)[0]
    mine = tokens.chunk(2)[dist.get_rank()]
    output = model(input_ids=mine, labels=mine)
    logits = output.logits.detach().argmax(-1) if mixed_precision == "no" else None
    accelerator.backward(output.loss)
    expected = whole(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    if logits is not None:
        assert torch.equal(logits, expected.logits.argmax(-1).chunk(2)[dist.get_rank()])
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, truth = parameter.grad.full_tensor(), theirs[name].grad
        error = (gradient - truth).norm() / truth.norm().clamp_min(1e-6)
        assert error <= tolerance, (name, error)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check("no", 1e-5)
    check("no", 1e-5, tie_word_embeddings=True)
    check("bf16", 0.3)
    leave()


if __name__ == "__main__":
    main()
