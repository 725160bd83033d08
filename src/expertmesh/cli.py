"""The console script `expertmesh`. Libraries are imported by the subcommand that needs them, so `--help` is fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from expertmesh.errors import ConfigError, install_one_line_reports

_HELP = """\
Expert parallelism for Hugging Face mixture-of-experts models.

usage: expertmesh COMMAND ...

commands:
  finetune RECIPE.yaml [--config LAUNCH.yaml] [--key value ...]
          fine-tune; with --config on the ranks that `accelerate launch` starts for it
  inspect CHECKPOINT [--verify]
          what a checkpoint or model folder holds, and whether it is complete; --verify reads and checks every byte
  export CHECKPOINT OUT [--dtype bf16|fp16|fp32] [--max-shard-size 5GB] [--config MODEL] [--overwrite]
          write a checkpoint's model alone, as a Hugging Face folder or to a URL like s3://bucket/model
  export ADAPTER OUT --merge [--base MODEL] [--dtype bf16|fp16|fp32] [--max-shard-size 5GB] [--overwrite]
          write the model that a LoRA adapter makes of its base model, which is never held whole
  export ADAPTER OUT --adapter-format per_expert [--base MODEL] [--overwrite]
          write an adapter of stacked experts as one for each expert and linear, for servers that want those
  doctor  what is installed, whether the launch hook is active, which dispatchers and computes work here

examples:
  expertmesh finetune launch_configs/quickstart.yaml
  expertmesh finetune launch_configs/quickstart.yaml --config launch_configs/ep2_cpu.yaml --max_steps 50
  expertmesh inspect outputs/run/checkpoint-500
  expertmesh export outputs/run/checkpoint-500 outputs/model --dtype bf16
  expertmesh export outputs/lora/checkpoint-500 outputs/merged --merge
  expertmesh doctor

`expertmesh finetune --help` lists the keys of a recipe."""


def main() -> None:
    """Run the subcommand that the command line names; its return value is the exit status."""
    install_one_line_reports()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_HELP)
        return
    if name not in _COMMANDS:
        raise ConfigError(f"{name!r} is not a command: choose among {', '.join(_COMMANDS)}.")
    sys.exit(_COMMANDS[name](arguments))


def finetune(arguments: Sequence[str]) -> int:
    """Check the recipe, then become the process that runs it, so that signals and the exit status are its own.

    Raises:
        ConfigError: the recipe cannot work, or the launch configuration is missing; nothing was started.
    """
    from expertmesh.finetune.arguments import help_text, read_recipe, wants_help

    launch_config, recipe_arguments = _take_launch_config(arguments)
    if wants_help(recipe_arguments):
        print(help_text())
        return 0
    read_recipe(recipe_arguments)
    command = finetune_command(launch_config, recipe_arguments)
    os.execv(command[0], command)


def finetune_command(launch_config: Path | None, recipe_arguments: Sequence[str]) -> list[str]:
    """The command line that runs a recipe: under `accelerate launch` if there is a launch configuration."""
    module = ["-m", "expertmesh.finetune", *recipe_arguments]
    if launch_config is None:
        return [sys.executable, *module]
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    return [*launcher, "--config_file", str(launch_config), *module]


def _take_launch_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate `--config FILE` (or `--config_file`) from what belongs to the recipe."""
    rest = list(arguments)
    for option in ("--config", "--config_file"):
        if option in rest:
            position = rest.index(option)
            if position + 1 == len(rest):
                raise ConfigError(f"{option} has no value: name a launch configuration.")
            path = Path(rest[position + 1])
            if not path.is_file():
                raise ConfigError(f"there is no launch configuration {str(path)!r}: correct the path.")
            return path, rest[:position] + rest[position + 2 :]
    return None, rest


def doctor(arguments: Sequence[str]) -> int:
    """Print every finding; the exit status is 1 if one of them keeps expert parallelism from working."""
    from expertmesh.doctor import findings

    if arguments:
        raise ConfigError(f"doctor takes no arguments, but got {' '.join(arguments)}.")
    found = findings()
    for finding in found:
        print(finding)
    return int(any(finding.broken for finding in found))


def inspect(arguments: Sequence[str]) -> int:
    """Print what a folder holds; the exit status is 1 if it is incomplete or damaged."""
    parser = _parser("inspect", "What a checkpoint or model folder holds, and whether it is complete.")
    parser.add_argument("checkpoint", type=Path, help="of expertmesh or Accelerate's FSDP2, or a Hugging Face model")
    parser.add_argument("--verify", action="store_true", help="read every byte, and compare all checksums")
    given = parser.parse_args(arguments)
    from expertmesh.checkpoint.inspection import inspect, verify
    from expertmesh.checkpoint.inspection_table import table

    found = inspect(given.checkpoint)
    verification = verify(found) if given.verify else None
    print(table(found, verification))
    return int(bool(found.problems or (verification and verification.problems)))


def export(arguments: Sequence[str]) -> int:
    """Write a checkpoint's model as a Hugging Face folder, merge an adapter, or write it in another layout."""
    parser = _parser("export", "Write a checkpoint's model alone, as a Hugging Face folder; or merge an adapter.")
    parser.add_argument(
        "checkpoint", type=Path, help="of expertmesh or Accelerate's FSDP2, a Hugging Face model, or a PEFT adapter"
    )
    parser.add_argument("output", help="a folder, or a URL that fsspec knows, like s3://bucket/model")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: as it is stored")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of a weight file; default: 5GB")
    parser.add_argument("--config", metavar="MODEL", help="folder or hub name, if the checkpoint has no config.json")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--adapter-format", choices=("per_expert",), help="one adapter for each expert and linear")
    parser.add_argument("--base", metavar="MODEL", help="the adapter's base model, if not the one that it names")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that the output holds")
    given = parser.parse_args(arguments)
    _refuse_together(given)
    from expertmesh.checkpoint.export import DTYPES, export, export_merged, export_per_expert
    from expertmesh.checkpoint.object_store import FALLBACK, is_url
    from expertmesh.checkpoint.sizes import parse_size

    if given.adapter_format:
        loadable = export_per_expert(given.checkpoint, given.output, base=given.base, overwrite=given.overwrite)
        print(f"saved to {given.output}")
        if not loadable:
            print("PEFT would leave out what is for single experts of this model: keep the original adapter for it.")
        return 0
    if is_url(given.output):
        print(f"{given.output}: {FALLBACK}.")
    options = {
        "dtype": DTYPES.get(given.dtype),
        "max_shard_size": parse_size(given.max_shard_size or "5GB"),
        "overwrite": given.overwrite,
    }
    if given.merge:
        export_merged(given.checkpoint, given.output, base=given.base, **options)
    else:
        export(given.checkpoint, given.output, config=given.config, **options)
    print(f"saved to {given.output}")
    return 0


def _refuse_together(given: argparse.Namespace) -> None:
    """Refuse options of `export` that would mean nothing."""
    form = "--merge" if given.merge else "--adapter-format" if given.adapter_format else None
    others = {"--adapter-format": given.adapter_format} if given.merge else {}
    if form is None:
        others = {"--base": given.base}
    else:
        others["--config"] = given.config
    if form == "--adapter-format":
        others |= {"--dtype": given.dtype, "--max-shard-size": given.max_shard_size}
    wrong = [option for option, value in others.items() if value is not None]
    if wrong:
        where = f"together with {form}" if form else "without --merge or --adapter-format"
        raise ConfigError(f"{', '.join(wrong)} means nothing {where}: leave it out.")


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see `{self.prog} --help`.")


def _parser(command: str, description: str) -> _Parser:
    return _Parser(prog=f"expertmesh {command}", description=description, allow_abbrev=False)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "finetune": finetune,
    "inspect": inspect,
    "export": export,
    "doctor": doctor,
}
