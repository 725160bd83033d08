"""Models with Transformer Engine's layers, emulated, against one process: run by `test_te_layers.py`.

Rank 0 prints one JSON object with the errors of each case, see `parity.py`; those of 8 bits under names that end so.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from leaving import leave

sys.path.append(str(Path(__file__).parents[1]))

from emulation import te_device
from emulation.install import installed
from parity import Case, by_position, run

case = partial(Case, ep=2, layers="te")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}
CASES = {
    "trained": case(),
    "efsdp": case(ep=1),
    "shared experts": case(family="qwen2_moe"),
    "latent attention": case(family="deepseek_v3"),
    "sinks and windows": case(family="gpt_oss"),
    "recomputed": case(checkpointing="full"),
    "selectively recomputed": case(checkpointing="selective"),
    "compiled": case(compiled=True),
    "adapters": case(lora={"target_modules": ["q_proj", "o_proj"]}),
    "experts too": case(compute="te"),
    "frozen": case(freeze=lambda name: "self_attn" in name),
    "bf16": case(bf16=True, routing=by_position),
    "all in 8 bits": case(fp8=True, compute="te", model=WIDE, routing=by_position),
    "recomputed in 8 bits": case(fp8=True, compute="te", model=WIDE, routing=by_position, checkpointing="full"),
    "experts recomputed in 8 bits": case(
        fp8=True, compute="te", model=WIDE, routing=by_position, checkpointing="experts_only"
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    te_device.ALLOW_CPU = True
    with installed("te"):
        results = {name: run(case) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
