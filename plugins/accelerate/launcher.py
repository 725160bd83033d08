"""`accelerate launch`, taught expert parallelism (EP).

Monkey-patches, checked on accelerate 1.15.0 and torch 2.13.0, each with a test in tests/test_launcher.py:

1. `accelerate.commands.utils.CustomArgumentParser.add_argument`. All four ways of launching build their parser from
   this class, and only launch's parser declares `training_script`. When it does, it is also given `--config` (an alias
   of `--config_file`), the `--parallelism_config_ep_*` options, and
2. a `parse_known_args` of its own, which ends by preparing the parsed arguments for EP. Nothing happens there unless
   the command line or the YAML holds an EP key.
3. `torch.distributed.run.run`, in a launch with EP only: workers that refuse their configuration end the launcher with
   their own exit code and without a traceback; they have said why themselves.

What the workers must know travels in `os.environ`, which the launcher hands on, and in the arguments, which it turns
into environment variables itself.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from expertmesh.config import ENV_PREFIX, EXPERT_KEYS, YAML_PREFIX, ExpertParallelConfig, refuse_unknown_keys
from expertmesh.errors import CONFIG_EXIT_CODE, ConfigError

FSDP_PREFIX = "fsdp_"

# What EP needs from FSDP, and what stock FSDP2 for Transformers needs where nobody said anything else.
FSDP_DEFAULTS = {
    "fsdp_version": "2",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": "false",
}

OTHER_ENGINES = ("multi_gpu", "tpu", "use_deepspeed", "use_megatron_lm")


def patch_launch_parser(parser_class: type[ArgumentParser]) -> None:
    """Apply patches 1 and 2 to the class of Accelerate's command line parsers."""
    add_argument = parser_class.add_argument

    @functools.wraps(add_argument)
    def add_argument_and_ours(self: ArgumentParser, *args: Any, **kwargs: Any) -> None:
        add_argument(self, *args, **kwargs)
        if args == ("training_script",):
            _add_our_options(self)
            self.parse_known_args = _then_prepare(self.parse_known_args)

    parser_class.add_argument = add_argument_and_ours


def prepare_launch(args: Namespace) -> None:
    """Turn the parsed command line of `accelerate launch` into one that starts EP workers, if an EP key asks for it.

    Raises:
        SystemExit: with `CONFIG_EXIT_CODE`, after one line on stderr, if the launch cannot work.
    """
    defaults = _file_defaults(args)
    explicit = _explicit_options(args, defaults)
    if not any(_concerns_experts(name) for name in explicit):
        return
    try:
        config = _accept(args, defaults, explicit)
    except ConfigError as error:
        print(f"expertmesh: {error}", file=sys.stderr)
        raise SystemExit(CONFIG_EXIT_CODE) from None
    _imply(args, explicit, config)
    os.environ.update(worker_environment(config, on_cpu=_trains_on_cpu(defaults)))
    _end_like_the_workers()


def worker_environment(config: ExpertParallelConfig, *, on_cpu: bool) -> dict[str, str]:
    """The variables that Accelerate's launcher does not know how to set."""
    environment = {ENV_PREFIX + name.upper(): str(getattr(config, name)) for name in EXPERT_KEYS}
    # With FSDP in its YAML, Accelerate starts the workers also where there is no accelerator, but does not tell them.
    return environment | {"ACCELERATE_USE_CPU": "true"} if on_cpu else environment


def _add_our_options(parser: ArgumentParser) -> None:
    parser.add_argument("--config", dest="config_file", help="Alias of --config_file.")
    group = parser.add_argument_group("Expert parallelism (expertmesh)", "How a mixture of experts is spread.")
    for name, text in EXPERT_KEYS.items():
        # `ep_size` stays text too, so that a wrong one is refused the same way as in a YAML.
        group.add_argument(f"--{YAML_PREFIX}{name}", help=text.replace("%", "%%"))


def _then_prepare(parse_known_args: Callable[..., tuple[Namespace, list[str]]]) -> Callable[..., Any]:
    @functools.wraps(parse_known_args)
    def parse_and_prepare(*args: Any, **kwargs: Any) -> tuple[Namespace, list[str]]:
        namespace, rest = parse_known_args(*args, **kwargs)
        prepare_launch(namespace)
        return namespace, rest

    return parse_and_prepare


def _file_defaults(args: Namespace) -> Any:
    """What Accelerate will read from `--config_file` or the user's default file; `None` if it will read none."""
    from accelerate.commands.config import default_config_file, load_config_from_file

    if args.config_file is None and (args.cpu or not os.path.isfile(default_config_file)):
        return None
    return load_config_from_file(args.config_file)


def _explicit_options(args: Namespace, defaults: Any) -> dict[str, Any]:
    """Every FSDP and parallelism option that somebody gave, under its name on `args`: command line over YAML."""
    explicit = {}
    for block, prefix in (("fsdp_config", FSDP_PREFIX), ("parallelism_config", YAML_PREFIX)):
        values = getattr(defaults, block, None) or {}
        explicit |= {prefix + key.removeprefix(prefix): value for key, value in values.items()}
    # Accelerate's parser notes in `nondefault` which options were on the command line.
    spoken = {name: getattr(args, name) for name in args.nondefault if name.startswith((FSDP_PREFIX, YAML_PREFIX))}
    return explicit | spoken


def _concerns_experts(name: str) -> bool:
    """Whether an option is an EP key, known or misspelt."""
    return name.startswith(YAML_PREFIX) and name.removeprefix(YAML_PREFIX).startswith(("ep", "expert"))


def _accept(args: Namespace, defaults: Any, explicit: dict[str, Any]) -> ExpertParallelConfig:
    """The EP configuration of this launch.

    Raises:
        ConfigError: the launch cannot work.
    """
    _refuse_other_engines(args, defaults)
    _refuse_other_fsdp(explicit)
    try:
        refuse_unknown_keys(getattr(defaults, "parallelism_config", None) or {})
        config = ExpertParallelConfig.from_mapping(_only(YAML_PREFIX, explicit))
        config.validate(_world_size(args, defaults))
        _refuse_unknown_choices(config)
    except ConfigError as error:
        raise ConfigError(f"{_origin(args, defaults)}: {error}") from None
    return config


def _refuse_other_engines(args: Namespace, defaults: Any) -> None:
    if args.cpu:
        raise ConfigError(
            "--cpu starts one process without FSDP, which expert parallelism needs: leave it out. Machines without "
            "an accelerator train on CPUs anyway; elsewhere put `use_cpu: true` into the YAML."
        )
    for option in OTHER_ENGINES:
        if getattr(args, option):
            raise ConfigError(f"--{option} cannot be combined with expert parallelism: use --use_fsdp instead.")
    if defaults is None or args.use_fsdp:
        return
    kind = getattr(defaults.distributed_type, "value", defaults.distributed_type)
    if defaults.compute_environment != "LOCAL_MACHINE" or kind not in ("FSDP", "NO"):
        raise ConfigError(
            f"{_origin(args, defaults)}: distributed_type {kind} on {defaults.compute_environment.value} cannot be "
            f"combined with expert parallelism: set `distributed_type: FSDP` and `compute_environment: LOCAL_MACHINE`, "
            f"or pass --use_fsdp."
        )


def _refuse_other_fsdp(explicit: dict[str, Any]) -> None:
    version = str(explicit.get("fsdp_version", 2))
    if version != "2":
        raise ConfigError(f"expert parallelism needs FSDP2, but fsdp_version is {version}: set `fsdp_version: 2`.")
    if str(explicit.get("fsdp_cpu_ram_efficient_loading", False)).lower() in ("true", "1", "yes", "y", "on", "t"):
        raise ConfigError(
            "fsdp_cpu_ram_efficient_loading makes rank 0 load and send out the whole model, but with expert "
            "parallelism every rank loads and keeps its own share: set `fsdp_cpu_ram_efficient_loading: false`."
        )


def _refuse_unknown_choices(config: ExpertParallelConfig) -> None:
    # Only what somebody chose is looked up: these imports load Transformers, which a launcher has no other use for.
    if config.ep_dispatcher != "auto":
        from expertmesh.dispatch import check_dispatcher

        check_dispatcher(config.ep_dispatcher)
    if config.ep_compute != "auto":
        from expertmesh.compute import check_compute

        check_compute(config.ep_compute)
    if config.ep_layers not in ("auto", "hf"):
        from expertmesh.layers import check_layers

        check_layers(config.ep_layers)


def _world_size(args: Namespace, defaults: Any) -> int:
    """The number of processes Accelerate will start, by its own rules."""
    import torch

    given = getattr(defaults, "num_processes", None) if args.num_processes is None else args.num_processes
    if given is None and torch.accelerator.is_available():
        given = torch.accelerator.device_count()
    if given is None or given < 1:
        raise ConfigError("the number of processes is not known: pass --num_processes.")
    return given


def _origin(args: Namespace, defaults: Any) -> str:
    """Where the user should look."""
    if defaults is None:
        return "command line"
    return args.config_file or "the default file of `accelerate config`"


def _imply(args: Namespace, explicit: dict[str, Any], config: ExpertParallelConfig) -> None:
    """Say on `args` what an EP key implies, as if it had been on the command line."""
    sizes = {YAML_PREFIX + name: size for name, size in vars(config).items() if name.endswith("_size")}
    if config.dp_shard_size is None:
        sizes[f"{YAML_PREFIX}dp_shard_size"] = -1  # The workers infer it from how many they are.
    implied = FSDP_DEFAULTS | explicit | sizes
    vars(args).update(implied, use_fsdp=True, use_parallelism_config=True)
    args.nondefault |= implied.keys()


def _trains_on_cpu(defaults: Any) -> bool:
    import torch

    return getattr(defaults, "use_cpu", False) or not torch.accelerator.is_available()


def _end_like_the_workers() -> None:
    """Apply patch 3."""
    import torch.distributed.run as elastic
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    run = elastic.run

    @functools.wraps(run)
    def run_and_pass_on_refusals(args: Namespace) -> None:
        try:
            run(args)
        except ChildFailedError as error:
            refused = [rank for rank, failure in error.failures.items() if failure.exitcode == CONFIG_EXIT_CODE]
            if not refused:
                raise
            if 0 not in refused:
                print(
                    f"expertmesh: rank {refused[0]} refused its configuration, but rank 0, which says why, did not do "
                    f"so on this machine: look at the first machine's output, or start again.",
                    file=sys.stderr,
                )
            raise SystemExit(CONFIG_EXIT_CODE) from None

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_news)
    elastic.run = run_and_pass_on_refusals


def _is_news(record: logging.LogRecord) -> bool:
    """A log filter that drops elastic's report of a worker that refused its configuration and said so itself.

    That elastic ends the other workers is dropped too: it says so before it says why, and always does it.
    """
    if record.msg.startswith("failed (exitcode"):
        return CONFIG_EXIT_CODE not in record.args
    return not record.msg.startswith("Sending process")


def _only(prefix: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith(prefix)}
