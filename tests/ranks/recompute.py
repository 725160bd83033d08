"""Blocks that are recomputed with other rounding, on ranks: run by `test_recompute.py`; rank 0 prints one JSON object.

Two experts are nearly tied for every token, and a router that runs in the backward pass gets a nudged input, so that
it would choose others.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter

import torch
import torch.distributed as dist
from expertmesh_plugins.transformers.checkpointing import patch_checkpointing
from leaving import leave
from models import batches, build
from torch import nn
from torch.utils.checkpoint import CheckpointError

from expertmesh import ExpertParallelConfig, composition, parallelize
from expertmesh.config import CHOICES
from expertmesh.dispatch.all_to_all import AllToAll
from expertmesh.experts import find_experts

CALLS: Counter[str] = Counter()
LAYERS = 2
MODES = CHOICES["ep_activation_checkpointing"]


class Counted(AllToAll):
    """Counts what travels in forward direction."""

    def plan(self, *args):
        CALLS["plan"] += 1
        return super().plan(*args)

    def send(self, route, hidden, routing):
        CALLS["send" if routing is not None else "send gradients"] += 1
        return super().send(route, hidden, routing)


def nearly_tied() -> nn.Module:
    model = build("qwen3_moe", num_hidden_layers=LAYERS)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(1e-6)
    return model


def nudge(model: nn.Module) -> None:
    """Another rounding in recomputations, as from another kernel."""

    def nudged(module, args):
        if torch._C._current_graph_task_id() == -1:
            return None
        CALLS["nudges"] += 1
        return (args[0] + torch.randn_like(args[0]), *args[1:])

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(nudged)


def trained(how: str) -> dict[str, object]:
    """One step; how the loss and the gradients are, and what was called."""
    torch.manual_seed(0)
    model = nearly_tied()
    nudge(model)
    config = ExpertParallelConfig(ep_size=2, ep_activation_checkpointing=how if how in MODES else "none")
    if how == "enabled before":
        model.activation_checkpointing_enable()
    keep_routing = composition.keep_routing
    if how == "unprotected":
        model.activation_checkpointing_enable()
        composition.keep_routing = lambda *_: None
    parallelize(model, config)
    composition.keep_routing = keep_routing
    for experts in find_experts(model).values():
        experts.forward.plan.dispatcher.transport.__class__ = Counted
    if how == "enabled after":
        model.activation_checkpointing_enable()
    CALLS.clear()
    tokens = batches(1, 4, 12)[0].chunk(2)[dist.get_rank()]
    model.train()
    error = None
    loss = model(input_ids=tokens, labels=tokens).loss
    try:
        loss.backward()
    except (CheckpointError, RuntimeError) as raised:
        error = type(raised).__name__
    gradients = {} if error else {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return dict(loss=loss.item(), gradients=gradients, calls=dict(CALLS), error=error)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    patch_checkpointing()
    plain = trained("none")
    results = {"none": plain["calls"]}
    for how in ("full", "selective", "experts_only", "enabled before", "enabled after", "unprotected"):
        outcome = trained(how)
        errors = [
            (outcome["gradients"][name] - value).abs().max() / value.abs().max()
            for name, value in plain["gradients"].items()
            if name in outcome["gradients"] and "gate.weight" not in name
        ]
        results[how] = dict(
            loss=abs(outcome["loss"] - plain["loss"]),
            worst=max((error.item() for error in errors), default=None),
            calls=outcome["calls"],
            error=outcome["error"],
        )
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
