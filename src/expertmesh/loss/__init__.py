"""The loss of a language model from its hidden states: logits are made in pieces, used, and forgotten."""

from expertmesh.loss.chunked import linear_cross_entropy
from expertmesh.loss.install import take_loss_without_logits

__all__ = ["linear_cross_entropy", "take_loss_without_logits"]
