"""Held-out perplexity through `Trainer.evaluate`, exact over all ranks.

Trainer averages the loss over batches and ranks as if each held equally many tokens. We let it gather two numbers a
sequence instead: the summed negative log-likelihood of the labels, and how many there are.
"""

from __future__ import annotations

import numpy
import torch
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction

from expertmesh.finetune.data import IGNORED

# Outputs of a causal language model that are no logits: Trainer would gather them over all ranks.
IGNORED_OUTPUTS = ["past_key_values", "hidden_states", "attentions", "router_logits", "aux_loss"]


def likelihood_per_sequence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`[batch, 2]`: each sequence's summed negative log-likelihood, and its number of predicted tokens."""
    targets = labels[:, 1:]
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return torch.stack([losses.sum(1), (targets != IGNORED).sum(1).float()], dim=1)


def perplexity(prediction: EvalPrediction) -> dict[str, float]:
    """Token-weighted perplexity from what `likelihood_per_sequence` returned for every held-out sequence."""
    loss, tokens = prediction.predictions.sum(axis=0, dtype="float64")
    return {"perplexity": float(numpy.exp(loss / tokens)), "tokens": int(tokens)}
