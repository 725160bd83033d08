"""Models whose experts Transformer Engine's emulation computes, against one process: run by `test_te_experts.py`.

Rank 0 prints one JSON object with the errors of each case, see `parity.py`; those of 8 bits under names that end so.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from leaving import leave

sys.path.append(str(Path(__file__).parents[1]))

from emulation import precision, te, te_device, te_recipe
from emulation.install import installed
from expertmesh_plugins.transformer_engine import finalize
from parity import EXPERTS, Case, by_position, first_rank_only, run

LORA = {"target_parameters": [f"experts.{name}" for name in EXPERTS]}
# What recipes and DeepEP's kernels take.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 32}

case = partial(Case, ep=2, compute="te", dispatcher="all_to_all")
CASES = {
    "trained": case(),
    "efsdp": case(ep=1),
    "empty-rank": case(routing=first_rank_only, model={"norm_topk_prob": False}),
    "chunks": case(chunks=2),
    "recomputed": case(checkpointing="full"),
    "selectively-recomputed": case(checkpointing="selective"),
    "experts recomputed": case(checkpointing="experts_only"),
    "accumulation": case(micro_batches=2),
    "compiled": case(compiled=True),
    "frozen": case(freeze=lambda name: ".experts." in name),
    "lora": case(lora=LORA),
    "ungated": case(family="nemotron_h"),
    "bf16": case(routing=by_position, bf16=True),
}
BROUGHT = {
    "rows of DeepEP": case(dispatcher="deepep_expanded", model=WIDE),
    "rows of Transformer Engine": case(dispatcher="te_ep", model=WIDE),
}
EIGHT_BITS = {
    "trained in 8 bits": case(routing=by_position, model=WIDE),
    "recomputed in 8 bits": case(routing=by_position, model=WIDE, checkpointing="full"),
    "lora in 8 bits": case(routing=by_position, model=WIDE, lora=LORA),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    te_device.ALLOW_CPU = True
    with installed("te"):
        results = {name: run(case) for name, case in CASES.items()}
        with installed("deep_ep_v2"), patch.object(precision, "ALLOW_FLOAT32", True):
            results |= {name: run(case) for name, case in BROUGHT.items()}
            finalize()
        with te.autocast(recipe=te_recipe.Float8CurrentScaling()):
            results |= {name: run(case) for name, case in EIGHT_BITS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
