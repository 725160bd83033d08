"""What `expertmesh doctor` looks at. Each check is a function that returns findings, and changes nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.dispatch.transport import Situation

_SWITCHES = ("EXPERTMESH_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        text: what was found, with the remedy if something is to be done.
        works: False where it does not.
        required: whether expert parallelism needs it.
    """

    subject: str
    text: str
    works: bool = True
    required: bool = True

    @property
    def broken(self) -> bool:
        """Something that expert parallelism cannot do without does not work."""
        return self.required and not self.works

    def __str__(self) -> str:
        mark = "ok" if self.works else ("FAIL" if self.required else "--")
        return f"{mark:<5}{self.subject:<22} {self.text}"


def findings() -> list[Finding]:
    """The report of every check."""
    checks = (versions, accelerator, launch_hook, dispatchers, computes, layers)
    return list(chain.from_iterable(check() for check in checks))


def versions() -> Iterable[Finding]:
    """Python, this package, and every library it or one of its extras wants, against the version wanted."""
    yield Finding("python", platform.python_version())
    yield Finding("expertmesh", metadata.version("expertmesh"))
    for text in metadata.requires("expertmesh") or ():
        requirement = Requirement(text)
        extra = _extra_of(requirement)
        if extra != "dev":
            yield _version(requirement, extra)


def _version(requirement: Requirement, extra: str | None) -> Finding:
    wanted = str(requirement.specifier) or "any version"
    remedy = f"`pip install 'expertmesh[{extra}]'`" if extra else f"`pip install '{requirement.name}{wanted}'`"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        why = "optional, not installed" if extra else "not installed"
        return Finding(requirement.name, f"{why}: {remedy}", works=False, required=extra is None)
    works = requirement.specifier.contains(found, prereleases=True)
    text = f"{found} ({wanted})" if works else f"{found} is not {wanted}: {remedy}"
    return Finding(requirement.name, text, works, required=extra is None)


def _extra_of(requirement: Requirement) -> str | None:
    """The extra of this package that wants the requirement."""
    extras = metadata.metadata("expertmesh").get_all("Provides-Extra") or ()
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return None
    return next((extra for extra in extras if requirement.marker.evaluate({"extra": extra})), "dev")


def accelerator() -> Iterable[Finding]:
    """The devices PyTorch sees, and the communication backends it was built with."""
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield Finding("accelerator", f"none: processes run on the CPU ({os.cpu_count()} cores)")
    else:
        name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)()
        yield Finding("accelerator", f"{torch.accelerator.device_count()} x {name}")
    backends = [name for name in ("nccl", "gloo", "xccl", "mpi", "ucc") if dist.is_backend_available(name)]
    yield Finding("communication", ", ".join(backends) or "no backend", works=bool(backends))


def launch_hook() -> Iterable[Finding]:
    """Whether the entry point is installed, and whether it does its work in a launcher."""
    installed = [point for point in metadata.entry_points(group="torch.backends") if point.name == "expertmesh"]
    if not installed:
        yield Finding("launch hook", "not installed: `pip install expertmesh` writes it", works=False)
        return
    yield Finding("launch hook", f"installed as {installed[0].value}")
    off = [name for name in _SWITCHES if os.environ.get(name) == "0"]
    if off:
        yield Finding("launch hook", f"switched off: unset {' and '.join(off)}", works=False)
        return
    # The hook acts in a launcher's process only, so that is where to look.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--help"]
    launcher = subprocess.run(command, capture_output=True, text=True, check=False)
    active = "--parallelism_config_ep_size" in launcher.stdout
    text = "active" if active else f"inactive: {launcher.stderr.strip() or 'the launcher knows no --config'}"
    yield Finding("launch hook", text, works=active)


def dispatchers() -> Iterable[Finding]:
    """Which ways of moving tokens can be chosen as ep_dispatcher on this machine, and what `auto` comes to."""
    from expertmesh.dispatch.registry import TRANSPORTS, refusal
    from expertmesh.dispatch.select import PREFERENCE, ask, choose, describe

    situation = _usual_situation()
    yield Finding("situation", describe(situation))
    answers = ask("auto", situation)
    for name in TRANSPORTS.names:
        reason = refusal(name, situation)
        text = reason or "usable"
        if reason is None and name not in PREFERENCE:
            text = "usable by name; `auto` does not consider it"
        elif reason is None and answers[name] is not None:
            text = f"usable by name; `auto` passes over it: {answers[name]}"
        yield Finding(f"dispatcher {name}", text, works=reason is None, required=False)
    yield Finding("dispatcher auto", choose("auto", answers).name)


def _usual_situation() -> Situation:
    """What most people do: a model of Qwen3-30B-A3B's size in bfloat16 on the ranks of one node, here this machine."""
    import torch

    from expertmesh.dispatch.topology import topology
    from expertmesh.dispatch.transport import Situation

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ranks = max(torch.accelerator.device_count(), 2)
    return Situation(
        ep_size=ranks,
        num_experts=128,
        hidden=2048,
        dtype=torch.bfloat16,
        device=device,
        ranks_per_node=ranks,
        topology=topology(device.type),
    )


def computes() -> Iterable[Finding]:
    """Which ways of multiplying experts can be chosen as ep_compute."""
    from expertmesh.compute.select import COMPUTES, check_compute

    for name in COMPUTES.names:
        yield _choice("compute", name, check_compute)


def layers() -> Iterable[Finding]:
    """Which layers can be chosen as ep_layers, beside the model's own."""
    import torch

    from expertmesh.layers import LAYERS

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    for name in LAYERS.names:
        try:
            reason = LAYERS.find(name).refusal(device)
        except ConfigError as error:
            reason = str(error)
        yield Finding(f"layers {name}", reason or "usable", works=reason is None, required=False)


def _choice(kind: str, name: str, check: Callable[[str], None]) -> Finding:
    try:
        check(name)
    except ConfigError as error:
        return Finding(f"{kind} {name}", str(error), works=False, required=False)
    return Finding(f"{kind} {name}", "usable")
