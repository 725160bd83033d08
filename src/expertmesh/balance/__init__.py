"""How evenly a router spreads its tokens: counting them, and the usual ways to make it even."""

from expertmesh.balance.install import balance
from expertmesh.balance.z_loss import join_waiting

__all__ = ["balance", "join_waiting"]
