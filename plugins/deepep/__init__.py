"""DeepEP's dispatchers, one for each of the builds that exist under its name.

Written against DeepEP 1.2.1 (`v1`) and 2.1.0 (`v2`) and the branch hybrid-ep (`hybrid`).
"""

from expertmesh_plugins.deepep.buffers import destroy_buffers
from expertmesh_plugins.deepep.hybrid import HybridEP
from expertmesh_plugins.deepep.installed import DeepEP, DeepEPExpanded

__all__ = ["DeepEP", "DeepEPExpanded", "HybridEP", "destroy_buffers"]
