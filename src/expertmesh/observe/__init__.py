"""What can be seen while training runs."""

from expertmesh.observe.expert_load import ExpertLoad

__all__ = ["ExpertLoad"]
