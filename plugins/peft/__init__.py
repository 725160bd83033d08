"""PEFT adapters on expert weights, computed and sharded with the experts. Checked on peft 0.21.2."""

from expertmesh_plugins.peft.experts import adapted_experts

__all__ = ["adapted_experts"]
