"""Read what this machine shows of its devices and cores: `/dev`, `/sys` and `/proc`. Imports no torch.

No other module reads these paths, so that a test can put the folder of a recorded machine in the place of `ROOT`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path("/")
PLATFORM = sys.platform

# Device files of the drivers. A container may have any of them: /dev/nvidia4 without /dev/nvidia0.
DEVICE_FILES = (
    *("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "dxg", "kfd", "dri/renderD*", "davinci[0-9]*", "cambricon_dev*"),
    *("neuron[0-9]*", "accel/accel*", "accel[0-9]*", "vfio/[0-9]*", "hl[0-9]*", "mtgpu.*"),
)
_GPU_CLASSES = ("0x03", "0x12")
"""The first byte of the PCI class of display controllers and of processing accelerators; bridges have others."""


def has_device_files(*patterns: str) -> bool:
    """Return whether `/dev` has a file of one of these patterns."""
    return any(next((ROOT / "dev").glob(pattern), None) is not None for pattern in patterns)


def read(path: str | Path) -> str | None:
    """Return the text of a file below the root, or None where it cannot be read."""
    try:
        return (ROOT / path).read_text(errors="replace").strip()
    except OSError:
        return None


def usable_cores() -> list[int]:
    """Return the logical cores that this thread may use."""
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)", read("proc/thread-self/status") or "", re.MULTILINE)
    if found is not None:
        return parse_cpu_list(found[1])
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """Return the number of cores that the quota of the container is worth; None without a quota."""
    words = (read("sys/fs/cgroup/cpu.max") or "").split()
    if not words:  # version 1 of control groups has a file for each number
        folder = Path("sys/fs/cgroup/cpu")
        words = [read(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = float(words[0]), float(words[1])
    except (ValueError, IndexError):  # no such file, or "max": no quota
        return None
    return quota / period if quota > 0 and period > 0 else None


def numa_nodes() -> dict[int, list[int]]:
    """Return the logical cores of each NUMA node; {} where the kernel does not say."""
    folders = (ROOT / "sys/devices/system/node").glob("node[0-9]*")
    cores = {int(folder.name[4:]): read(folder / "cpulist") for folder in folders}
    return {node: parse_cpu_list(cores[node] or "") for node in sorted(cores)}


def threads_of_core(core: int) -> list[int]:
    """Return the logical cores that share a physical core with this one, itself included."""
    return parse_cpu_list(read(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core))


def pci_devices(vendor: str) -> list[str]:
    """Return the PCI addresses of a vendor's GPUs and accelerators, in their order; `vendor` is such as "0x10de"."""
    folders = sorted((ROOT / "sys/bus/pci/devices").glob("*"))
    return [
        folder.name
        for folder in folders
        if read(folder / "vendor") == vendor and (read(folder / "class") or "").startswith(_GPU_CLASSES)
    ]


def numa_node_of(address: str) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None where the kernel does not know it."""
    node = read(f"sys/bus/pci/devices/{address}/numa_node")
    return int(node) if node is not None and node.isdigit() else None  # -1: unknown


def parse_cpu_list(text: str) -> list[int]:
    """Parse a list such as `0-3,8,10-11`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
