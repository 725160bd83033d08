"""Models whose tokens travel by a dispatcher of another package, against one process: run on every rank.

The argument is its name. Rank 0 prints one JSON object with the errors of each case, see `parity.py`.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from leaving import leave
from parity import Case, run
from torch import Tensor


def first_experts(index: Tensor) -> Tensor:
    """Every token on experts 0 and 1: the other rank gets none."""
    return torch.arange(index.shape[1]).expand_as(index)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name = sys.argv[1]
    cases = {
        "trained": Case(ep=2, dispatcher=name),
        "empty-rank": Case(ep=2, dispatcher=name, routing=first_experts),
        "chunks": Case(ep=2, dispatcher=name, chunks=3),
        "recomputed": Case(ep=2, dispatcher=name, checkpointing="full"),
        "selectively-recomputed": Case(ep=2, dispatcher=name, checkpointing="selective"),
    }
    results = {label: run(case) for label, case in cases.items()}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
