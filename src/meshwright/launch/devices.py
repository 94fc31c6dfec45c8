"""Count the accelerators and cores of this machine, without torch where possible."""

from __future__ import annotations

from ..runtime.devices import machine


def count_accelerators() -> int:
    """Return the number of accelerators that torch can use here."""
    # Without a device file of any driver there is no accelerator, and torch need not be imported.
    if machine.PLATFORM == "linux" and not machine.has_device_files(*machine.DEVICE_FILES):
        return 0
    from ..runtime.devices import device, xla

    return 1 if xla.is_used() else device.count()  # one process drives all XLA devices of a host


def count_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the quota of its container."""
    allowed = len(machine.usable_cores())
    return max(1, min(allowed, int(machine.cpu_quota() or allowed)))
