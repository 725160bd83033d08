"""Choosing among the engines, emulated on both ranks or on the first only: run by `test_engine_choice.py` on 2 ranks.

Where an emulation is not installed, packages that fail when they are imported are found under the engines' names.
Prints one JSON object a rank: for each emulation and name of a dispatcher what was chosen, or the refusal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from emulation.install import installed
from leaving import leave

from expertmesh.dispatch.select import agree, ask, choose
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError

SITUATION = Situation(
    ep_size=2, num_experts=16, hidden=512, dtype=torch.bfloat16, device=torch.device("cpu"), ranks_per_node=2
)
# Each emulation, and the names by which it can be asked for.
EMULATIONS = {
    "deep_ep_v1": ("deepep",),
    "deep_ep_v2": ("deepep", "deepep_expanded"),
    "hybrid_ep": ("hybridep",),
    "te": ("te_ep",),
}


def outcomes(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in ("auto", *names):
        try:
            yield name, choose(name, agree(ask(name, SITUATION))).name
        except ConfigError as error:
            yield name, str(error)


def main() -> None:
    dist.init_process_group("gloo")
    chosen = {}
    for emulation, names in EMULATIONS.items():
        with installed(emulation):
            chosen[f"{emulation} on all"] = dict(outcomes(names))
        with installed(emulation) if dist.get_rank() == 0 else nullcontext():
            chosen[f"{emulation} on rank 0"] = dict(outcomes(names))
    print(json.dumps(chosen))
    leave()


if __name__ == "__main__":
    main()
