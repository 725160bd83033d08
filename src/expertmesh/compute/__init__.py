"""What runs on the rows: the projections, the gate between them, and choosing how to multiply."""

from expertmesh.compute.select import build_expert_function, check_compute, choose_compute

__all__ = ["build_expert_function", "check_compute", "choose_compute"]
