"""The one place where expert parallelism, activation checkpointing and FSDP2 are composed, in that order.

`apply_expert_parallel` does the experts and leaves the rest of the model to whoever shards dense weights (Accelerate's
`prepare`, for one). `parallelize` is the whole composition on plain PyTorch.

Why gradients are exactly data-parallel's: every rank's loss is a mean over its own tokens, and the global loss is the
mean over the `n = dp_replicate * dp_shard * cp` ranks. A dense gradient is averaged by FSDP2 over those `n` ranks. An
expert's gradient already holds the contributions of all tokens that were sent to it; what is left to do is to add up
those of the ranks that hold the same expert, and to divide by the same `n`, not by the size of that smaller group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from expertmesh.adapters import find_adapters
from expertmesh.balance import balance
from expertmesh.compute import check_compute
from expertmesh.config import ExpertParallelConfig
from expertmesh.dispatch import check_dispatcher
from expertmesh.errors import ConfigError
from expertmesh.expert_parallel import Replaced, install_forward, plan_experts, shard_by_expert
from expertmesh.experts import check_divisible, find_experts
from expertmesh.host_memory import keep_freed_memory
from expertmesh.layers import check_layers, replace_layers
from expertmesh.loss import take_loss_without_logits
from expertmesh.mesh import ExpertMesh, build_dense_mesh, build_expert_mesh
from expertmesh.norms import keep_less
from expertmesh.overlap import run_shared_experts_ahead
from expertmesh.recompute import OF_BLOCKS, keep_routing


@dataclass(frozen=True)
class ShardedExperts:
    """What `apply_expert_parallel` did.

    Attributes:
        replaced: every routed parameter, and those of its adapters, before and after.
        unmanaged: the routed parameters that no FSDP2 unit holds: whoever shards the rest must leave them out.
    """

    replaced: list[Replaced] = field(default_factory=list)
    unmanaged: list[nn.Parameter] = field(default_factory=list)


def check_model(model: nn.Module, config: ExpertParallelConfig) -> dict[str, nn.Module]:
    """Refuse a model that cannot be spread as the configuration asks; nothing is touched.

    Returns:
        The experts modules by qualified name.

    Raises:
        ModelError: no routed experts, or a number of experts that `ep_size` does not divide.
        ConfigError: a dispatcher, compute or layers that do not exist.
    """
    check_dispatcher(config.ep_dispatcher)
    check_compute(config.ep_compute)
    check_layers(config.ep_layers)
    experts = find_experts(model)
    check_divisible(experts, config.ep_size)
    return experts


def apply_expert_parallel(
    model: nn.Module,
    config: ExpertParallelConfig,
    mesh: ExpertMesh,
    dense_mesh: DeviceMesh,
    device: torch.device,
    fsdp_options: dict[str, Any],
    trainable_dtype: torch.dtype | None = None,
    fp8: bool = False,
) -> ShardedExperts:
    """Shard every experts module by expert, and over `(dp_replicate, efsdp)` where ranks share experts.

    Where none do (`efsdp` 1, no replicas) FSDP2 would have nothing to gather and nothing to reduce, and would still
    copy every weight and gradient several times; the experts then stay plain DTensors on `ep`, and the division of
    their gradients happens inside the weight-gradient GEMM.

    Args:
        model: whole on this rank, nothing sharded yet.
        config: resolved for the world size.
        mesh: the expert view of the ranks.
        dense_mesh: the dense view, for parameters inside an experts module that are not one slice an expert.
        device: where the weights are computed.
        fsdp_options: keyword arguments of `fully_shard` other than the mesh, `mp_policy` among them.
        trainable_dtype: store trainable routed parameters in this dtype (float32 master weights).
        fp8: let layers multiply in 8 bits, see `replace_layers`.

    Raises:
        ModelError, ConfigError: see `check_model` and `replace_layers`; nothing has been touched then.
    """
    modules = check_model(model, config)
    replace_layers(model, config, device, fp8)
    if config.ep_layers == "auto":
        keep_less(model)
    compute_dtype = fsdp_options["mp_policy"].param_dtype
    plans = plan_experts(modules, find_adapters(model), config, mesh, device, compute_dtype)
    if device.type == "cpu":
        keep_freed_memory()
    managed = mesh.shares_experts or isinstance(fsdp_options.get("offload_policy"), CPUOffloadPolicy)
    gradient_scale = 1.0 if managed else 1.0 / mesh.data_parallel_size
    result = ShardedExperts()
    for name, experts in modules.items():
        plan = plans[name]
        replaced = shard_by_expert(experts, plan.spec, mesh, device, trainable_dtype, plan.adapters)
        install_forward(experts, plan, gradient_scale, compute_dtype)
        for child in experts.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=dense_mesh, **fsdp_options)
        if managed:
            _fully_shard_experts(plan.called, mesh, fsdp_options)
        else:
            result.unmanaged.extend(pair.new for pair in replaced)
        result.replaced.extend(replaced)
    if config.ep_overlap and config.ep_size > 1:
        run_shared_experts_ahead(model, {plan.called for plan in plans.values()}, device)
    mode = config.ep_activation_checkpointing
    keep_routing(model, mode if mode in OF_BLOCKS else "full")
    return result


def _fully_shard_experts(experts: nn.Module, mesh: ExpertMesh, fsdp_options: dict[str, Any]) -> None:
    # The forward casts the tokens itself and leaves the routing weights in float32, as FSDP2 would not.
    options = {**fsdp_options, "mp_policy": replace(fsdp_options["mp_policy"], cast_forward_inputs=False)}
    efsdp_size = mesh.mesh["efsdp"].size()
    fully_shard(experts, mesh=mesh.fsdp, shard_placement_fn=partial(_efsdp_placement, efsdp_size), **options)
    experts.set_gradient_divide_factor(float(mesh.data_parallel_size))
    if efsdp_size > 1:
        # The default, a pre-multiplied sum, does not exist on gloo, and on NCCL zeroes bf16 gradients
        # (pytorch#190745). With one shard FSDP2 already divides by itself, and this would divide once more.
        experts.set_force_sum_reduction_for_comms(True)


def _efsdp_placement(efsdp_size: int, parameter: nn.Parameter) -> Shard:
    """Whole experts a rank where they divide evenly; else every expert's rows, so that no rank is left without."""
    num_local_experts, width = parameter.to_local().shape[:2]
    by_rows = num_local_experts % efsdp_size != 0 and width % efsdp_size == 0
    return Shard(1) if by_rows else Shard(0)


def parallelize(
    model: nn.Module,
    config: ExpertParallelConfig,
    *,
    device: torch.device | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    fp8: bool = False,
) -> nn.Module:
    """Compose expert parallelism, activation checkpointing and FSDP2 on a model, without Accelerate. Collective.

    Build the optimizer afterwards, from the returned model's parameters. Clip gradients by mesh: the experts' and the
    dense parameters' DTensors live on different ones.

    Args:
        model: a Transformers model, whole and with the same weights on every rank.
        config: sizes and choices.
        device: where to train; by default the current accelerator, or the CPU.
        mp_policy: FSDP2's mixed precision.
        reshard_after_forward: whether gathered weights are freed between forward and backward.
        fp8: multiply in 8 bits, as `config.ep_fp8_recipe` says; `config.ep_layers` has to be an engine's that can.

    Returns:
        The same model.

    Raises:
        ConfigError: the sizes do not fit the world size, or a choice does not exist.
        ModelError: the model has no experts, or a number that `ep_size` does not divide, or nothing to balance where
            the configuration asks for it.
    """
    if not dist.is_initialized():
        raise ConfigError("parallelize needs torch.distributed: call torch.distributed.init_process_group first.")
    config = config.resolve(dist.get_world_size())
    check_model(model, config)
    balance(model, config)
    device = torch.device(device) if device is not None else _default_device()
    take_loss_without_logits(model, config, device)
    dense_mesh = build_dense_mesh(config, device.type)
    options = {"mp_policy": mp_policy or MixedPrecisionPolicy(), "reshard_after_forward": reshard_after_forward}
    if config.ep_activation_checkpointing in OF_BLOCKS:
        for parent, name, block in list(_blocks(model)):
            setattr(parent, name, checkpoint_wrapper(block, preserve_rng_state=False))
    mesh = build_expert_mesh(config, device.type)
    sharded = apply_expert_parallel(model, config, mesh, dense_mesh, device, options, fp8=fp8)
    ignored = set(sharded.unmanaged)
    for _, _, block in list(_blocks(model)):
        fully_shard(block, mesh=dense_mesh, ignored_params=ignored, **options)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=dense_mesh, ignored_params=ignored, **options)
    return model


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The repeated blocks that Transformers declares unsplittable: parent, attribute name, block."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child).__name__ in names:
                yield parent, name, child


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
