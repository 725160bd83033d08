"""Choosing a dispatcher where something works on one rank only: run by `test_dispatcher_choice.py` on 2 ranks.

Prints one JSON object a rank: for each name what was built, or the refusal, and what was logged. The dispatchers named
here come from packages that the test installed; `auto` is made to prefer them.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
from leaving import leave
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from expertmesh.dispatch import build_dispatcher, select
from expertmesh.dispatch.topology import topology
from expertmesh.dispatch.transport import Situation
from expertmesh.errors import ConfigError


def outcome(name: str, mesh: DeviceMesh) -> dict[str, str]:
    """What a choice comes to on this rank: `built` or `refused`, and what is `logged`."""
    situation = Situation(
        ep_size=mesh.size(),
        num_experts=8,
        hidden=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranks_per_node=mesh.size(),
        topology=topology("cpu"),
    )
    log = logging.StreamHandler(io.StringIO())
    select.logger.addHandler(log)
    try:
        built = {"built": type(build_dispatcher(name, mesh, situation).transport).__name__}
    except ConfigError as error:
        built = {"refused": str(error)}
    select.logger.removeHandler(log)
    return {**built, "logged": log.stream.getvalue()}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    select.logger.setLevel(logging.INFO)
    outcomes = {name: outcome(name, mesh) for name in sys.argv[1:]}
    for name in sys.argv[1:]:
        with patch.object(select, "PREFERENCE", (name, "all_to_all")):
            outcomes[f"auto, {name} first"] = outcome("auto", mesh)
    print(json.dumps(outcomes))
    leave()


if __name__ == "__main__":
    main()
