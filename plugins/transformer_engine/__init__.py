"""Transformer Engine's expert parallelism on NCCL, as a dispatcher. Written against Transformer Engine 2.20.2."""

from __future__ import annotations

from expertmesh_plugins.transformer_engine.expert_parallel import TransformerEngineEP
from expertmesh_plugins.transformer_engine.session import finalize

__all__ = ["TransformerEngineEP", "finalize"]
