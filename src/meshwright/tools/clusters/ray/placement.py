"""Reserve resources of a Ray cluster for the ranks, and number the ranks by node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ....errors import LaunchError

SECONDS_BEFORE_NOTICE = 10.0
SECONDS_PER_SMALLER_SIZE = 3.0
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What is asked of the cluster."""

    least: int
    most: int
    """Ranks: `most` if the cluster has room for them in time, at least `least`."""
    resources: Mapping[str, float]
    """Of each rank."""
    strategy: str = "PACK"
    seconds: float = 600.0
    """How long to wait for room."""
    elastic_seconds: float = 30.0
    """How long to wait for `most` ranks, before fewer are taken."""


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """One rank: its numbers, and where it runs."""

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_id: str
    address: str
    bundle: int


@contextmanager
def reserved(request: ClusterRequest, say: Callable[[str], None]) -> Iterator[tuple[Any, list[RankPlacement]]]:
    """Reserve a placement group for as many ranks as there is room for; remove it after the block."""
    from ray.util.placement_group import remove_placement_group

    group = _reserve(request, say)
    try:
        yield group, _places(group)
    finally:
        remove_placement_group(group)


def _reserve(request: ClusterRequest, say: Callable[[str], None]) -> Any:
    end = time.monotonic() + request.seconds
    patience = request.seconds if request.least == request.most else min(request.elastic_seconds, request.seconds)
    for size in range(request.most, request.least - 1, -1):
        if size == request.least:
            patience = end - time.monotonic()
        if (group := _group(request, size, patience, say if size in (request.least, request.most) else None)) is None:
            patience = SECONDS_PER_SMALLER_SIZE
            continue
        if size < request.most:
            say(f"there is room for {size} of {request.most} workers; the run goes on with {size}.")
        return group
    import ray

    raise LaunchError(
        f"The Ray cluster had no room for {_wanted(request, request.least)} within {request.seconds:g} s. It has "
        f"{_shown(ray.cluster_resources())}, of which {_shown(ray.available_resources())} are free. Add nodes, end "
        "other jobs, or ask for fewer workers or smaller resources_per_worker."
    )


def _group(request: ClusterRequest, size: int, seconds: float, say: Callable[[str], None] | None) -> Any:
    """Return a placement group of `size` ranks, or None if there is no room in time."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(request.resources)] * size, strategy=request.strategy)
    ready = False
    try:
        early = min(seconds, SECONDS_BEFORE_NOTICE)
        ready = group.wait(early)
        if not ready and seconds > early:
            if say is not None:
                say(f"waiting for {_wanted(request, size)}, for up to {seconds:.0f} s.")
            ready = group.wait(seconds - early)
        return group if ready else None
    finally:
        if not ready:
            remove_placement_group(group)


def _wanted(request: ClusterRequest, size: int) -> str:
    return f"{size} worker(s) with {_shown(request.resources)} each ({request.strategy})"


def _shown(resources: Mapping[str, float]) -> str:
    named = {name: number for name, number in resources.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{number:g} {name}" for name, number in sorted(named.items())) or "nothing"


def _places(group: Any) -> list[RankPlacement]:
    """Number the ranks so that those of a node follow each other, as every launcher does."""
    import ray
    from ray.util.placement_group import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    places: list[RankPlacement] = []
    for node_rank, node in enumerate(nodes):
        bundles = [bundle for bundle in sorted(node_of) if node_of[bundle] == node]
        places += [
            RankPlacement(
                rank=len(places) + local_rank,
                local_rank=local_rank,
                local_world_size=len(bundles),
                node_rank=node_rank,
                node_id=node,
                address=addresses[node],
                bundle=bundle,
            )
            for local_rank, bundle in enumerate(bundles)
        ]
    return places


def draining_nodes() -> set[str]:
    """Return the ids of nodes that are to be taken away: Ray has no public function for it."""
    with suppress(Exception):
        from ray._private.state import state

        return set(state.get_draining_nodes())
    return set()
