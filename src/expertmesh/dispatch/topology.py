"""How the accelerators of this machine reach each other and other machines, as far as that can be told.

It is told by PyTorch, by NVIDIA's management library (NVML, a part of the driver) and by Linux, and by nothing that has
to be installed. Where none of them knows, neither do we.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import torch

_SUCCESS = 0
_P2P_BY_NVLINK = 2
_P2P_WORKS = 0


@dataclass(frozen=True)
class Topology:
    """What lies between ranks.

    Attributes:
        link: what joins every pair of this machine's visible accelerators: `nvlink`; `pcie` if some pair has no NVLink.
        rdma: whether a network card of this machine can write into another's memory and is connected; None if nobody
            told. Whether it reaches the GPUs' memory, and the other machines of the job, cannot be seen from here.
    """

    link: Literal["nvlink", "pcie", "unknown"] = "unknown"
    rdma: bool | None = None

    def __str__(self) -> str:
        link = {"nvlink": "NVLink", "pcie": "PCIe", "unknown": "unknown"}[self.link]
        rdma = {True: "yes", False: "no", None: "unknown"}[self.rdma]
        return f"link between accelerators {link}, RDMA {rdma}"


UNKNOWN = Topology()


def ranks_per_node() -> int | None:
    """Ranks of this job on this machine, as the launcher says; None if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


@cache
def topology(device_type: str) -> Topology:
    """What can be told about this machine.

    Args:
        device_type: `cuda`, `cpu`, ...; links are known between CUDA devices only.
    """
    link = _link(_load_nvml(), _visible_gpus()) if device_type == "cuda" else "unknown"
    return Topology(link, _rdma(Path("/sys/class/infiniband"), Path("/dev/infiniband")))


def _visible_gpus() -> list[str]:
    """NVML's names of the GPUs that this process may use, which PyTorch may number in another order."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]


def _load_nvml() -> Any | None:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def _link(nvml: Any | None, gpus: Sequence[str]) -> Literal["nvlink", "pcie", "unknown"]:
    if nvml is None or len(gpus) < 2 or nvml.nvmlInit_v2() != _SUCCESS:
        return "unknown"
    try:
        handles = [ctypes.c_void_p() for _ in gpus]
        for handle, name in zip(handles, gpus, strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != _SUCCESS:
                return "unknown"
        status = ctypes.c_uint()
        by_nvlink = True
        for one, other in combinations(handles, 2):
            if nvml.nvmlDeviceGetP2PStatus(one, other, _P2P_BY_NVLINK, ctypes.byref(status)) != _SUCCESS:
                return "unknown"
            by_nvlink = by_nvlink and status.value == _P2P_WORKS
        return "nvlink" if by_nvlink else "pcie"
    finally:
        nvml.nvmlShutdown()


def _rdma(cards: Path, doors: Path) -> bool | None:
    """Whether some port of some card is up, and its device file is here, as it is not in every container."""
    if not Path("/sys/class").is_dir():
        return None
    states = [path.read_text() for path in cards.glob("*/ports/*/state")]
    return any("ACTIVE" in state for state in states) and any(doors.glob("uverbs*"))
