"""Blocks compiled by Accelerate's own switch, on ranks: run by `test_compiled.py`; rank 0 prints one JSON object."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from leaving import leave
from models import batches, build
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from expertmesh import ExpertMeshConfig

STEPS = 3


def trained(family: str, compute: str, backend: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the gradients of the last step; batches grow, so that sizes are found to change."""
    torch._dynamo.reset()
    AcceleratorState._reset_state()
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    config = ExpertMeshConfig(ep_size=dist.get_world_size(), ep_compute=compute)
    accelerator = Accelerator(parallelism_config=config, dynamo_plugin=plugin)
    model = build(family)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batches(STEPS, 4, 10 + 2 * step)[step].chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    accelerator.free_memory()
    return losses, gradients


def compared(family: str, compute: str) -> dict[str, object]:
    losses, gradients = trained(family, compute, "no")
    counters.clear()
    clear_compilation_metrics()
    compiled_losses, compiled_gradients = trained(family, compute, "aot_eager")
    breaks = dict(counters["graph_break"])
    return {
        "compiled": sorted(
            {
                f"{Path(each.co_filename).name}:{each.co_name}"
                for each in get_compilation_metrics()
                if each.co_filename and not each.fail_type
            }
        ),
        "breaks": {" ".join(reason.split()): times for reason, times in breaks.items()},
        "loss": max(abs(a - b) / abs(a) for a, b in zip(losses, compiled_losses, strict=True)),
        "gradient": max(
            ((compiled_gradients[name] - value).abs().max() / value.abs().max()).item()
            for name, value in gradients.items()
        ),
        "compared": len(gradients),
    }


def main(*cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    results = {case: compared(*case.split(":")) for case in cases}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
