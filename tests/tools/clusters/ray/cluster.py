"""A real Ray cluster of two nodes on this machine: on loopback addresses, without dashboard and usage statistics."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.config.environment import patch_environment

# Not 127.0.0.1, which Ray replaces by the address of the machine's first network card.
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
_QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
_MISSING = "ray._private.utils.get_dashboard_dependency_error"
_STORE = 80 * 2**20


@dataclass
class TwoNodes:
    """The cluster, and its second node."""

    cluster: Any
    second: Any

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def drain_second_node(self) -> None:
        """Announce that the second node will be taken away, as a provider of spot instances does."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline = int((time.time() + 600) * 1000)
        GcsClient(address=self.address).drain_node(self.second.node_id, reason, "a test", deadline)


def _node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": _STORE}


@contextmanager
def two_nodes(cpus: int = 2, gpus: int = 0) -> Iterator[TwoNodes]:
    """Start two nodes and connect to them; `gpus` are only numbers, which Ray hands out."""
    pytest.importorskip("ray", reason="Ray is not installed (accelerate[ray])")
    if os.name != "posix" or os.uname().sysname != "Linux":
        pytest.skip("several loopback addresses: Linux only")
    with patch_environment(**_QUIET):
        import ray
        from ray.cluster_utils import Cluster

        head = {"node_ip_address": HEAD, "num_gpus": gpus, "no_monitor": True, **_node(cpus)}
        # A server and agents of the dashboard are started even without one, and take most of the time.
        with patch("ray._private.node.Node.start_api_server"), patch(_MISSING, lambda: "not wanted"):
            cluster = Cluster(initialize_head=True, head_node_args=head)
            second = cluster.add_node(node_ip_address=SECOND, **_node(cpus))
        try:
            ray.init(address=cluster.address, _node_ip_address=HEAD)
            yield TwoNodes(cluster, second)
        finally:
            ray.shutdown()
            cluster.shutdown()
