"""PEFT's adapters under expert parallelism: computed and sharded with the experts, kept in PEFT's own folder.

Checked on peft 0.21.2.
"""

from expertmesh_plugins.peft.experts import adapted_experts, as_stored
from expertmesh_plugins.peft.folder import holds_adapters, load_adapters, save_adapters

__all__ = ["adapted_experts", "as_stored", "holds_adapters", "load_adapters", "save_adapters"]
