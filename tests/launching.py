"""Take a command line through Accelerate's own launcher inside the test process, up to where it would start workers."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.distributed.run as elastic
from accelerate.commands import config as commands_config
from accelerate.commands import launch
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import launch as utils_launch
from expertmesh_plugins.accelerate.launcher import patch_launch_parser
from processes import clean_environment

ELASTIC_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")


class Launcher:
    """`accelerate launch` with our patches, on a machine with or without an accelerator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(CustomArgumentParser, "add_argument", CustomArgumentParser.add_argument)
        monkeypatch.setattr(elastic, "run", elastic.run)
        # Nothing listens in the end, so a job that uses the port at this moment does not matter.
        monkeypatch.setattr(utils_launch, "is_port_in_use", lambda port: False)
        monkeypatch.setattr(ELASTIC_LOG, "filters", list(ELASTIC_LOG.filters))
        self.set_default_file("/there/is/none.yaml")
        self.set_accelerators(0)
        patch_launch_parser(CustomArgumentParser)

    def set_default_file(self, path: object) -> None:
        """Make `path` the file that `accelerate config` wrote."""
        for module in (commands_config, commands_config.config_args, launch):
            self._monkeypatch.setattr(module, "default_config_file", str(path))

    def set_accelerators(self, number: int) -> None:
        """Pretend that the machine has so many GPUs."""
        self._monkeypatch.setattr(torch.accelerator, "is_available", lambda: number > 0)
        self._monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    def workers(self, *command_line: object) -> tuple[str, dict[str, str]]:
        """Which of Accelerate's launchers would run, and the environment it would give to its workers."""
        chosen: dict[str, Namespace] = {}
        # What our hook tells the workers through `os.environ` must not outlive this call.
        with self._monkeypatch.context() as patched, mock.patch.dict(os.environ, clean_environment(), clear=True):
            patched.setattr(launch, "multi_gpu_launcher", lambda args: chosen.update(distributed=args))
            patched.setattr(launch, "simple_launcher", lambda args: chosen.update(simple=args))
            launch.launch_command(launch.launch_command_parser().parse_args([str(word) for word in command_line]))
            ((kind, args),) = chosen.items()
            self.num_processes = args.num_processes
            return kind, utils_launch.prepare_multi_gpu_env(args)
