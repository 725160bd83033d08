"""One dispatcher on real ranks against one rank's own arithmetic: exits 0 if they agree, 77 if it cannot be used.

    python benchmarks/layer_parity.py --dispatcher deepep --ranks 8                # on GPUs, bfloat16
    python benchmarks/layer_parity.py --dispatcher all_to_all --ranks 2 --device cpu   # on CPUs, float32

A layer of experts that is spread over the ranks must give the output and all gradients that the whole layer gives
alone, for even and uneven numbers of tokens, a rank without any, and tokens that all choose the same experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

# Before anything imports torch, here and in the processes that inherit this environment.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import torch.distributed as dist
from arm_processes import ArmProcesses
from dispatch_arms import TIMED, TRANSFORMERS, Layer, Sizes, build_layer, load_model
from torch import Tensor, nn
from transformers.utils import logging

from expertmesh.errors import ConfigError
from expertmesh.experts import find_experts

UNUSABLE = 77
SIZES = Sizes(tokens=96, hidden=512, intermediate=64, num_experts=32, top_k=4)
SCENARIOS = ("even", "uneven", "a rank without tokens", "all to the same experts", "even again")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}


class Worker:
    """One rank."""

    def __init__(self, dispatcher: str, saved: Path, device_type: str, rank: int) -> None:
        self._rank = rank
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
        )
        self._dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
        (self._whole,) = find_experts(load_model(saved, self._dtype).to(self._device)).values()
        self._build = partial(build_layer, TIMED[dispatcher], saved, self._dtype, self._device)
        self._layer: Layer | None = None

    def build(self) -> str | None:
        """Why the dispatcher cannot be used; None if it can."""
        try:
            self._layer = self._build()
        except ConfigError as error:
            return str(error)
        return None

    def wrong(self, scenario: str) -> str | None:
        """What is wrong in a scenario on this rank, with errors relative to the largest entry; None if nothing is."""
        batch = self._batch(scenario)
        ours = _step(self._layer.forward, self._layer.weights, batch)
        theirs = _step(self._whole, list(self._whole.parameters()), batch)
        expected = [*theirs, *(self._of_all_ranks(weight.grad) for weight in self._whole.parameters())]
        errors = [_error(*pair) for pair in zip([*ours, *self._layer.weight_gradients()], expected, strict=True)]
        names = ("output", "gradient of tokens", "of routing weights", "of the projection up", "of the one down")
        found = [
            f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True) if not error <= self._tolerance
        ]
        return f"rank {self._rank}: {', '.join(found)}" if found else None

    @property
    def _tolerance(self) -> float:
        return TOLERANCES[self._dtype]

    def _batch(self, scenario: str) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = SIZES.batch(self._rank, self._dtype, self._device)
        if scenario == "all to the same experts":
            index = torch.arange(SIZES.top_k, device=self._device).expand_as(index).contiguous()
        size = SIZES.tokens
        if scenario == "uneven":
            size //= self._rank + 1
        if scenario == "a rank without tokens" and self._rank == dist.get_world_size() - 1:
            size = 0
        return hidden[:size], index[:size], weights[:size]

    def _of_all_ranks(self, gradient: Tensor) -> Tensor:
        """What this rank's experts get from the tokens of all ranks, averaged over the ranks."""
        total = gradient.float()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[self._rank] / dist.get_world_size()


def _step(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    batch: tuple[Tensor, Tensor, Tensor],
) -> list[Tensor]:
    """The output and the gradients of tokens and routing weights; those of parameters are left with them."""
    for parameter in parameters:
        parameter.grad = None
    hidden, index, weights = batch
    hidden, weights = hidden.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    output = forward(hidden, index, weights)
    output.backward(torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype))
    return [output.detach(), hidden.grad, weights.grad]


def _error(actual: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0 if actual.shape == expected.shape else float("inf")
    difference = (actual.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max().clamp_min(1e-12))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatcher", choices=sorted(set(TIMED) - {TRANSFORMERS}), default="all_to_all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--lifetime", type=float, default=600, help="seconds after which a process ends itself")
    return parser.parse_args()


def main() -> int:
    chosen = _arguments()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        SIZES.save_model(Path(folder))
        build = partial(Worker, chosen.dispatcher, Path(folder), chosen.device)
        with ArmProcesses(chosen.dispatcher, build, chosen.ranks, chosen.lifetime, chosen.device) as processes:
            processes.wait_until_built()
            refused = [reason for reason in processes.call("build") if reason is not None]
            if refused:
                print(refused[0])
                return UNUSABLE
            wrong = {scenario: [said for said in processes.call("wrong", scenario) if said] for scenario in SCENARIOS}
    for scenario, said in wrong.items():
        print(f"{scenario}: {'; '.join(said) or 'equal'}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
