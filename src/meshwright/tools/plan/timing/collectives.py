"""Estimate the seconds of one collective from its bytes and from where its ranks are."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.devices.catalogue import DeviceCluster
from ..trace import Collective


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the ranks of a group are."""

    ranks: int
    nodes: int
    local: int
    """Ranks on the fullest node."""


def collective_seconds(collective: Collective, cluster: DeviceCluster) -> float:
    """Estimate a collective: bytes over the narrowest level of links, and one latency for each step.

    Inside a node and between nodes the data move at once, in rings that use the network adapter of every member.
    """
    counts = cluster.nodes_of(collective.ranks)
    places = _Places(len(collective.ranks), len(counts), max(counts.values(), default=1))
    if places.ranks < 2:
        return 0.0
    inside, between = _bytes(collective.name, collective.size, places)
    efficiency = cluster.device.efficiency
    moving = max(
        inside / (cluster.node.link * efficiency.link),
        between / (cluster.node.network * efficiency.network),
    )
    return moving + _latency(collective.name, places, cluster)


def _bytes(name: str, size: int, places: _Places) -> tuple[float, float]:
    """Return the bytes that one device sends over the links of its node, and those over its network adapter."""
    n, nodes, local = places.ranks, places.nodes, places.local
    if name in ("send", "recv"):
        return (0.0, float(size)) if nodes > 1 else (float(size), 0.0)
    if name == "barrier":
        return 0.0, 0.0
    if name.startswith("all_to_all"):
        return size * (local - 1) / n, size * (n - local) / n
    if name in ("broadcast", "reduce", "gather", "scatter"):
        return float(size) if local > 1 else 0.0, size / local if nodes > 1 else 0.0
    rounds = 2 if name == "all_reduce" else 1  # a reduce-scatter, then an all-gather
    inside = size * (n - 1) / n if local > 1 else 0.0
    between = size * (nodes - 1) / nodes / local
    return rounds * inside, rounds * between


def _latency(name: str, places: _Places, cluster: DeviceCluster) -> float:
    """Return the latencies of the steps: of a ring through all ranks, or of a tree over the nodes."""
    inside, between = cluster.node.link_latency, cluster.node.network_latency
    if name in ("send", "recv"):
        return between if places.nodes > 1 else inside
    if name in ("all_reduce", "broadcast", "reduce", "barrier"):
        return 2 * (inside * (places.local - 1) + between * (places.nodes - 1).bit_length())
    return inside * (places.ranks - places.nodes) + between * (places.nodes - 1)
