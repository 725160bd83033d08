"""What computes experts: one class a way of doing it.

The arithmetic is that of `routed.py`: for row `p` of token `t` and expert `e`, `y_p = gate(x_t W_up) W_down`, and
`out_t = sum_p w_p y_p`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from expertmesh.compute.routed import ExpertTensors
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.experts import ExpertsSpec


class ExpertCompute(ABC):
    """One way of computing the experts of one module.

    Attributes:
        needs_counts_on_host: whether it reads `ExpertRows.rows_per_expert`.

    Args:
        experts: the module, its weights already where they are computed.
        spec: its layout.
        gradient_scale: factor on the gradients of weights and biases (not on those of tokens).
    """

    needs_counts_on_host: ClassVar[bool]

    @classmethod
    @abstractmethod
    def refusal(cls, experts: nn.Module, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why it cannot compute a module here, and what to do about it; None if it can. Never raises.

        Args:
            experts: the module, not sharded yet.
            spec: its layout.
            dtype: what rows will be computed in.
            device: where.
        """

    @abstractmethod
    def __init__(self, experts: nn.Module, spec: ExpertsSpec, gradient_scale: float) -> None: ...

    @abstractmethod
    def __call__(self, tensors: ExpertTensors, tokens: Tensor, row_weights: Tensor, rows: ExpertRows) -> Tensor:
        """The weighted sum over this rank's experts for each received token.

        Differentiable in the tokens, the row weights and every leaf of the parameters.

        Args:
            tensors: this rank's parameters; other dtypes than the tokens' are cast as they are used.
            tokens: `[received, hidden]`.
            row_weights: `[rows]` float32.
            rows: the plan.

        Returns:
            `[received, hidden]` in the tokens' dtype.
        """
