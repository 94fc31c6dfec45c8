"""Count the accelerators and cores of this machine, without torch where possible."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Device files of the drivers. Without any of them there is no accelerator, and torch need not be imported.
_DRIVER_FILES = (
    *("/dev/nvidia0", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD128", "/dev/davinci0", "/dev/cambricon_dev0"),
    *("/dev/neuron0", "/dev/accel/accel0", "/dev/accel0", "/dev/hl0", "/dev/mtgpu.0"),
)


def count_accelerators() -> int:
    """Return the number of accelerators that torch can use here."""
    if sys.platform == "linux" and not any(Path(trace).exists() for trace in _DRIVER_FILES):
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def count_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(_container_quota() or allowed)))


def _container_quota() -> float | None:
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            if period_file is not None:
                words += Path(period_file).read_text().split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max": no quota
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None
