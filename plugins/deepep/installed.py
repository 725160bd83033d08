"""The build of DeepEP that is installed: V2 where it is, whose package still has V1's class too, else V1."""

from __future__ import annotations

from expertmesh_plugins.deepep.engine import unavailable
from expertmesh_plugins.deepep.v1 import DeepEPV1
from expertmesh_plugins.deepep.v2 import DeepEPV2
from expertmesh_plugins.deepep.v2_expanded import DeepEPV2Expanded
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.dispatch.transport import Situation, Transport


class DeepEP(Transport):
    """Each token once to every rank that needs it, as a `DeepEPV2` or `DeepEPV1`."""

    def __new__(cls, ep_mesh: DeviceMesh, situation: Situation) -> Transport:
        """The transport of the installed build."""
        return _newest()(ep_mesh, situation)

    @classmethod
    def refusal(cls, situation: Situation) -> str | None:
        """See `Transport.refusal`."""
        return _newest().refusal(situation)


class DeepEPExpanded(DeepEPV2Expanded):
    """Rows rather than tokens, and nothing that the host waits for."""


def _newest() -> type[Transport]:
    return DeepEPV1 if unavailable("ElasticBuffer") and not unavailable("Buffer") else DeepEPV2
