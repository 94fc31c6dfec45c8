"""What offload costs: bytes over the bus, and the time that the device waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ....runtime.devices.device import has_streams
from ....runtime.devices.memory import peak_memory

_MEASURED_STEP = 3
"""The first one steps after the backward pass, and the second one is still new to the allocator."""


class Traffic:
    """Counters of one step."""

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self._host_seconds = 0.0
        self._steps = 0
        self._began = 0.0
        self._seconds = 0.0
        self._waits: list[tuple[torch.Event, torch.Event]] = []

    @property
    def _measures(self) -> bool:
        return self._steps == _MEASURED_STEP - 1

    @contextmanager
    def waiting(self, stream: torch.Stream) -> Iterator[None]:
        """Measure how long a stream waits for other streams inside the context."""
        if not self._measures:
            yield
            return
        before, after = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self._waits.append((before, after))

    @contextmanager
    def host_waiting(self, device: torch.device, *, measures: bool = True) -> Iterator[None]:
        """Measure how long the host waits inside the context, after the device has computed everything."""
        if not (measures and self._measures):
            yield
            return
        if has_streams(device):
            torch.accelerator.current_stream(device).synchronize()
        begin = time.perf_counter()
        yield
        self._host_seconds += time.perf_counter() - begin

    def is_measured(self, device: torch.device) -> bool:
        """Count a step; return whether it was the one that is measured."""
        if has_streams(device) and self._steps >= _MEASURED_STEP - 2:
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        self._steps += 1
        if self._measures:
            self._began, self.bytes_in, self.bytes_out = now, 0, 0
        self._seconds = now - self._began
        return self._steps == _MEASURED_STEP

    def describe(self, places: str, device: torch.device) -> str:
        """Return the line about the measured step."""
        waits = self._host_seconds + sum(before.elapsed_time(after) for before, after in self._waits) / 1000
        self._waits.clear()
        known = peak_memory(device) if has_streams(device) else 0
        peak = f"; peak of the device {megabytes(known)}" if known else ""
        return (
            f"Offload: {places}{peak}; {megabytes(self.bytes_in)} in and {megabytes(self.bytes_out)} out per step; "
            f"{100 * waits / self._seconds:.0f} % of the step waits for transfers and for steps on the host."
        )


def megabytes(num_bytes: int) -> str:
    """Return a size in words."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"
