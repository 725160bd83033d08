"""PEFT's adapters under expert parallelism: computed and sharded with the experts, kept in PEFT's own folder.

Checked on peft 0.21.2.
"""

from expertmesh_plugins.peft.experts import adapted_experts, as_stored
from expertmesh_plugins.peft.folder import holds_adapters, load_adapters, save_adapters
from expertmesh_plugins.peft.merge import PeftAdaptation, base_of, load_adapter
from expertmesh_plugins.peft.per_expert import write_per_expert

__all__ = [
    "PeftAdaptation",
    "adapted_experts",
    "as_stored",
    "base_of",
    "holds_adapters",
    "load_adapter",
    "load_adapters",
    "save_adapters",
    "write_per_expert",
]
