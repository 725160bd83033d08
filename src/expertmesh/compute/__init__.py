"""What runs on the rows: the projections, the gate between them, and choosing how to multiply."""

from expertmesh.compute.protocol import ExpertCompute
from expertmesh.compute.select import check_compute, choose_compute

__all__ = ["ExpertCompute", "check_compute", "choose_compute"]
