"""Kernels for what lies between the experts' GEMMs, and the compute that uses them.

Only `kernels.py` imports Triton, and it is imported when experts are first computed with it.
"""

from expertmesh.compute.triton.experts import TritonExperts

__all__ = ["TritonExperts"]
