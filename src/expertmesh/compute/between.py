"""What happens to rows between the GEMMs of `routed.py`, so that kernels can take the place of PyTorch's operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.compute.gate import Gate
from expertmesh.dispatch.rows import ExpertRows, RowRange


@dataclass(frozen=True)
class GateGradients:
    """What the backward takes from a gate.

    Attributes:
        projected: `[rows, up_width]`, the gradient of the projection's output.
        row_weights: `[rows]` float32, the gradient of the routing weights.
        weighted_activation: `[rows, intermediate]`, the activation times the routing weight; None if not asked for.
    """

    projected: Tensor
    row_weights: Tensor
    weighted_activation: Tensor | None


class Total(ABC):
    """`[received, width]`, the sum of each token's rows, taken in float32."""

    @abstractmethod
    def add(self, part: RowRange, rows: Tensor, row_weights: Tensor | None = None) -> None:
        """Add `[rows, width]`, times `[rows, 1]` float32 where weights are given. The rows may be overwritten."""

    @abstractmethod
    def result(self) -> Tensor:
        """The sum, in the dtype of the tokens."""


class Between(ABC):
    """One way of doing it."""

    @abstractmethod
    def activation(self, projected: Tensor) -> Tensor:
        """`[rows, up_width]` to `[rows, intermediate]`. What is given stays as it is."""

    @abstractmethod
    def gate_gradients(
        self, projected: Tensor, grad_activation: Tensor, row_weights: Tensor, needs_activation: bool
    ) -> GateGradients:
        """The gate's backward.

        Args:
            projected: `[rows, up_width]`, kept as it is.
            grad_activation: `[rows, intermediate]`, without the routing weights; may be overwritten.
            row_weights: `[rows, 1]` float32.
            needs_activation: whether `GateGradients.weighted_activation` is asked for.
        """

    @abstractmethod
    def total(self, rows: ExpertRows, tokens: Tensor) -> Total:
        """A sum with nothing in it, like `tokens` (`[received, width]`)."""


class PlainTotal(Total):
    """By `index_add_` into float32; where each row is a token, by assignment."""

    def __init__(self, rows: ExpertRows, tokens: Tensor) -> None:
        self._dtype = tokens.dtype
        self._total = rows.new_total(tokens)

    def add(self, part: RowRange, rows: Tensor, row_weights: Tensor | None = None) -> None:
        """See `Total.add`."""
        part.add_to(self._total, rows if row_weights is None else rows.float().mul_(row_weights))

    def result(self) -> Tensor:
        """See `Total.result`."""
        return self._total.to(self._dtype)


class PlainBetween(Between):
    """PyTorch's operations, with any gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def activation(self, projected: Tensor) -> Tensor:
        """See `Between.activation`."""
        return self._gate(projected)

    def gate_gradients(
        self, projected: Tensor, grad_activation: Tensor, row_weights: Tensor, needs_activation: bool
    ) -> GateGradients:
        """See `Between.gate_gradients`."""
        activation, gate_backward = self._gate.pullback(projected)
        weights = row_weights.to(projected.dtype)
        grad_weights = (grad_activation * activation).sum(1, dtype=torch.float32)
        weighted = activation * weights if needs_activation else None
        return GateGradients(gate_backward(grad_activation.mul_(weights)), grad_weights, weighted)

    def total(self, rows: ExpertRows, tokens: Tensor) -> Total:
        """See `Between.total`."""
        return PlainTotal(rows, tokens)
