"""Giving a model what its configuration asks for."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from expertmesh.balance.aux_loss import computes_the_same, global_balancing_loss
from expertmesh.balance.bias import BiasUpdate
from expertmesh.balance.routed import called_experts
from expertmesh.balance.z_loss import RouterZLoss
from expertmesh.config import ExpertParallelConfig
from expertmesh.plugins import load_plugin
from expertmesh.ranks import num_ranks

_DONE = "_expertmesh_balanced"


def balance(model: nn.Module, config: ExpertParallelConfig, *, z_loss_to_returned: bool = True) -> None:
    """Balance a model's routers as the configuration says, before or after it is sharded; once for each model.

    A model without routed experts is left alone.

    Args:
        model: the whole model, as it is called.
        config: what is asked for.
        z_loss_to_returned: whether the loss that the model returns is trained with. Otherwise whoever calls `backward`
            gives the loss to `join_waiting` before.

    Raises:
        ModelError: the model has no correction bias, no router logits, or a load-balancing loss of its own kind, and
            the configuration asks for what would need it.
    """
    if hasattr(model, _DONE) or not called_experts(model):
        return
    setattr(model, _DONE, True)
    engine = import_module(f"{load_plugin('transformers').__name__}.balance")
    if config.ep_balance_aux_loss == "global" and num_ranks() > 1:
        engine.replace_balancing_loss(model, global_balancing_loss, computes_the_same)
    if config.ep_balance_bias_rate:
        BiasUpdate(model, config.ep_balance_bias_rate)
    if config.ep_z_loss:
        RouterZLoss(model, config.ep_z_loss, engine.router_logits(model), to_returned=z_loss_to_returned)
