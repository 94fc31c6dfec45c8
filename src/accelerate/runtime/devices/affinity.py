"""Pin a process to its share of the cores, so that processes neither share caches nor cross NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path


def set_numa_affinity(
    local_process_index: int, verbose: bool | None = None, *, local_processes: int | None = None
) -> list[int]:
    """Pin this process to its share of the cores it may use, NUMA node by NUMA node, and return the share.

    The nearest accelerator is not considered: ranks and NUMA nodes are matched in order.
    """
    from ..process import ProcessInfo

    if not hasattr(os, "sched_setaffinity"):  # not on macOS
        return []
    cores = _by_numa_node(os.sched_getaffinity(0))
    processes = local_processes or ProcessInfo.from_environment().local_world_size
    share = _share(cores, local_process_index, processes)
    os.sched_setaffinity(0, share)
    if verbose:
        print(f"Local rank {local_process_index} runs on the cores {', '.join(map(str, share))}.", flush=True)
    return share


def _share(cores: list[int], index: int, processes: int) -> list[int]:
    if processes >= len(cores):  # more processes than cores: one core each, round robin
        return [cores[index % len(cores)]]
    start, end = index * len(cores) // processes, (index + 1) * len(cores) // processes
    return cores[start:end]


def _by_numa_node(allowed: set[int]) -> list[int]:
    ordered: list[int] = []
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            ordered += [core for core in _parse_cpu_list((node / "cpulist").read_text()) if core in allowed]
        except OSError:
            continue
    return ordered + sorted(allowed.difference(ordered))


def _parse_cpu_list(text: str) -> list[int]:
    """Parse a list such as `0-3,8,10-11`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
