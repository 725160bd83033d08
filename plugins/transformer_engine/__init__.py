"""Transformer Engine: its expert parallelism on NCCL as a dispatcher, its GroupedLinear as a compute of experts, and
its Linear, RMSNorm and attention as layers.

Written against Transformer Engine 2.20.2.
"""

from __future__ import annotations

from expertmesh_plugins.transformer_engine.expert_parallel import TransformerEngineEP
from expertmesh_plugins.transformer_engine.experts import TransformerEngineExperts
from expertmesh_plugins.transformer_engine.layers import TransformerEngineLayers
from expertmesh_plugins.transformer_engine.session import finalize

__all__ = ["TransformerEngineEP", "TransformerEngineExperts", "TransformerEngineLayers", "finalize"]
