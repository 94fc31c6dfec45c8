"""Compare the memory of a rank with what devices have."""

from __future__ import annotations

from dataclasses import dataclass

from .allocator import MIB
from .peak import Memory

GROUP = 200 * MIB
"""Device memory that NCCL takes for the buffers of one group of ranks. Nobody measured it for this plan: it is the
usual size for some dozen channels, and `NCCL_BUFFSIZE` and `NCCL_MAX_NCHANNELS` change it."""

FITS, EXPANDABLE, TIGHT, FULL = "fits", "fits with expandable_segments", "tight", "does not fit"
"""Tight: what is allocated fits, but not what the allocator would hold. It then returns cached memory to the driver and
asks again, which is slow and can fail."""


@dataclass
class Fit:
    """Whether the rank with the most memory fits on a kind of device."""

    device: str
    capacity: float
    """Bytes of the device."""
    libraries: float
    """Of them, what driver and communication library take."""
    allocated: float
    reserved: float
    expandable: float
    """What the allocator holds with its default settings, and with expandable_segments."""
    rank: int = 0

    @property
    def available(self) -> float:
        """Return the bytes that the allocator can have."""
        return self.capacity - self.libraries

    @property
    def needed(self) -> float:
        """Return what the allocator holds, with the settings under which it fits."""
        return self.reserved if self.reserved <= self.available else min(self.reserved, self.expandable)

    @property
    def margin(self) -> float:
        """Return the bytes that remain; negative if they lack."""
        return self.available - self.needed

    @property
    def verdict(self) -> str:
        """Return FITS, EXPANDABLE, TIGHT or FULL."""
        if self.reserved <= self.available:
            return FITS
        if self.expandable <= self.available:
            return EXPANDABLE
        return TIGHT if self.allocated <= self.available else FULL


def libraries_of(context: float, groups: int) -> float:
    """Return what driver and libraries take: the context of a process, and the buffers of its groups of ranks."""
    return context + groups * GROUP


def fit_of(memory: Memory, device: str, capacity: float, libraries: float, rank: int = 0) -> Fit:
    """Compare a rank with a device."""
    return Fit(
        device=device,
        capacity=capacity,
        libraries=libraries,
        allocated=max(memory.total, memory.setup),
        reserved=memory.reserved,
        expandable=memory.expandable,
        rank=rank,
    )
