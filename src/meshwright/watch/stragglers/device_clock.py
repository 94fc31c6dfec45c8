"""Measure the phases of a step in the device's time."""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from typing import Any

import torch

from ...runtime.devices.device import has_streams, is_capturing
from ...runtime.phases import BACKWARD, NAMES, OTHER, STEP, PhaseClock, Row

_SKIPPED = -1
_MOST_PENDING = 64
"""Steps whose events are kept: a host is a few steps ahead of its device at most."""


def clock_for(device: torch.device) -> PhaseClock:
    """Return the clock for the training thread of a process with this device."""
    return DeviceClock(device) if has_streams(device) else PhaseClock()


class DeviceClock(PhaseClock):
    """Measure by events on the stream of the training thread, because the host runs ahead of the device.

    The host waits for the device wherever it happens to ask for a value. On a rank that calls `loss.item()` the host's
    time shows the passes of the device there, and on the other ranks nowhere. Between two events lies what the device
    did in a phase, or how long it had nothing to do because the host was slow.

    [Note: queries of events] Only the training thread asks whether an event has passed, once per step. While it
    captures a graph, a query by another thread would invalidate the capture, and Python's lock is held during a query:
    from another thread it would hold up the launch of kernels. A captured event has no time and must never be asked, so
    what is captured counts as one piece.
    """

    __slots__ = ("_device", "_free", "_marks", "_pending")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._free: deque[Any] = deque()
        self._pending: deque[tuple[int, list[tuple[int, Any]]]] = deque(maxlen=_MOST_PENDING)
        self._marks: list[tuple[int, Any]] = [(OTHER, self._record())]

    def enter(self, phase: int) -> int:
        """Enter a phase, and return the previous one."""
        before = self._phase
        self._mark(before)
        self._phase = phase
        if BACKWARD <= phase <= STEP:
            self.trained += 1
        return before

    def skip(self) -> None:
        """Leave out the time since the last change of phase: the loop was not training."""
        self._mark(_SKIPPED)

    def forget(self) -> None:
        """Leave out all that was measured since the last step ended: it was an evaluation."""
        if is_capturing(self._device):
            return
        self._free.extend(event for _, event in self._marks[1:])  # the first one is the last of the step before
        self._marks = [(OTHER, self._record())]

    def collect(self) -> deque[Row]:
        """Return the steps that have not been read yet; those that the device has not completed come later."""
        if threading.get_ident() == self.thread:
            self._read_completed()
        return self.rows

    def _read_completed(self) -> None:
        """Measure the steps that the device has completed. See [Note: queries of events]."""
        while self._pending and not is_capturing(self._device):
            step, marks = self._pending[0]
            try:
                if not marks[-1][1].query():
                    break
                self._keep((step, _seconds(marks)))
            except RuntimeError:  # events that were recorded into a graph have no time
                pass
            self._pending.popleft()
            self._free.extend(event for _, event in marks[:-1])  # the last one is the first of the next step

    def _end_step(self) -> None:
        self._pending.append((self.steps, self._marks))
        self._marks = self._marks[-1:]
        self.steps += 1
        self._stepped = False
        self._read_completed()

    def _mark(self, phase: int) -> None:
        """End a piece of a phase here, unless a graph is captured."""
        if not is_capturing(self._device):
            self._marks.append((phase, self._record()))

    def _record(self) -> Any:
        event = self._free.popleft() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def _seconds(marks: list[tuple[int, Any]]) -> list[float]:
    """Return the seconds per phase between the first event of a step and its last one."""
    seconds = [0.0] * len(NAMES)
    for (_, start), (phase, end) in pairwise(marks):
        if phase != _SKIPPED:
            seconds[phase] += start.elapsed_time(end) / 1e3
    return seconds
