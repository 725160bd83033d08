"""Two ranks save a sharded model to a URL; then to one where rank 1 cannot write."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from leaving import leave
from models import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from expertmesh.checkpoint.checkpoint import save_model
from expertmesh.errors import CheckpointError

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
model = build("qwen3_moe")
if dist.get_rank() == 0:
    model.save_pretrained(folder / "stock")
    # A folder in the way of the second file.
    (folder / "blocked" / "model-00002-of-00006.safetensors").mkdir(parents=True)
dist.barrier()
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
save_model(model, f"file://{folder}/url", max_shard_size=40_000)
try:
    save_model(model, f"file://{folder}/blocked", max_shard_size=40_000)
except CheckpointError as error:
    print("refused:", error)
leave()
