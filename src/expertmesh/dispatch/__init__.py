"""Moving tokens between ranks: the protocol, the ways to do it, and choosing one."""

from expertmesh.dispatch.closing import close_engines
from expertmesh.dispatch.protocol import Dispatched, TokenDispatcher
from expertmesh.dispatch.rows import ExpertRows
from expertmesh.dispatch.select import build_dispatcher, check_dispatcher

__all__ = ["Dispatched", "ExpertRows", "TokenDispatcher", "build_dispatcher", "check_dispatcher", "close_engines"]
