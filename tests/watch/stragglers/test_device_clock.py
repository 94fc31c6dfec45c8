"""Step times on devices that compute later than the host asks: a rank is not slow because its host waits."""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import Any, ClassVar

import pytest
import torch

from meshwright.runtime.phases import BACKWARD, DATA, FORWARD, OTHER, STEP, PhaseClock
from meshwright.watch.stragglers import device_clock
from meshwright.watch.stragglers.device_clock import DeviceClock, clock_for
from tests.simulated_accelerator import on_a_simulated_accelerator, set_delays

KERNEL = 0.005
STEPS = 10


def run_steps(clock: PhaseClock, *, reads_values: bool = False, data_seconds: float = 0.0) -> list[list[float]]:
    """Do steps of a loop: two kernels forward, four backward, one step; then perhaps read a value."""
    value = torch.ones(4, device="gpu")
    torch.accelerator.synchronize()
    for _ in range(STEPS):
        clock._request_batch(DATA)
        time.sleep(data_seconds)
        clock.enter(FORWARD)
        for phase, kernels in ((BACKWARD, 2), (STEP, 4), (OTHER, 1)):
            for _ in range(kernels):
                value = value + 1
            clock.optimizer_stepped() if phase == OTHER else clock.enter(phase)
        if reads_values:
            value.tolist()
    clock._request_batch(DATA)
    torch.accelerator.synchronize()
    return [seconds for _, seconds in clock.collect()]


def medians(clock: PhaseClock, **loop: Any) -> list[float]:
    rows = run_steps(clock, **loop)
    assert len(rows) == STEPS
    return [median(column) for column in zip(*rows, strict=True)]


@on_a_simulated_accelerator
def test_phases_have_the_time_of_the_device_on_a_simulated_accelerator() -> None:
    device = torch.device("gpu", 0)
    set_delays(kernel_time=KERNEL)
    for reads_values in (False, True):
        found = medians(DeviceClock(device), reads_values=reads_values)
        assert found[FORWARD] > KERNEL
        assert found[BACKWARD] > 2 * KERNEL
        assert found[OTHER] + found[DATA] < 2 * KERNEL, "a host that waits for its device is not slow"
    by_the_host = medians(PhaseClock(), reads_values=True)
    assert by_the_host[OTHER] > 4 * KERNEL, "which is why the host's time is not used"


@on_a_simulated_accelerator
def test_loading_counts_as_far_as_the_device_waits_for_it_on_a_simulated_accelerator() -> None:
    device = torch.device("gpu", 0)
    set_delays(kernel_time=KERNEL)
    kernel = max(KERNEL, medians(DeviceClock(device))[FORWARD])  # on a machine with other work
    assert medians(DeviceClock(device), data_seconds=25 * kernel)[DATA] > 10 * KERNEL
    assert medians(DeviceClock(device), data_seconds=KERNEL)[DATA] < 3 * KERNEL, "the device had work meanwhile"


@on_a_simulated_accelerator
def test_events_are_used_again_on_a_simulated_accelerator() -> None:
    clock = DeviceClock(torch.device("gpu", 0))
    for _ in range(3):
        assert len(run_steps(clock)) > 0
        clock.rows.clear()
    assert len(clock._free) <= 6 * (STEPS + 2), "not more than one round needs"


def in_a_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class SimulatedEvent:
    """An event that notes which threads ask for it, and whether it was recorded during a capture."""

    askers: ClassVar[set[int]] = set()
    is_capturing: ClassVar[bool] = False

    def __init__(self) -> None:
        assert not SimulatedEvent.is_capturing, "it must never be asked for"

    def query(self) -> bool:
        assert not SimulatedEvent.is_capturing, "which invalidates the capture"
        self.askers.add(threading.get_ident())
        return True

    def elapsed_time(self, other: SimulatedEvent) -> float:
        return 1.0


@pytest.fixture
def clock_of_simulated_events(monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr(DeviceClock, "_record", lambda clock: SimulatedEvent())
    monkeypatch.setattr(device_clock, "is_capturing", lambda device: SimulatedEvent.is_capturing)
    SimulatedEvent.askers.clear()
    return DeviceClock(torch.device("cpu"))


def test_only_the_training_thread_asks_for_simulated_events(clock_of_simulated_events: DeviceClock) -> None:
    clock = clock_of_simulated_events
    for _ in range(4):
        clock._request_batch(DATA)
        clock.enter(FORWARD)
        clock.optimizer_stepped()
        in_a_thread(clock.collect)
    assert SimulatedEvent.askers == {threading.get_ident()}
    assert len(clock.collect()) == 3


def test_a_step_with_a_captured_part_is_measured_by_simulated_events(
    clock_of_simulated_events: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = clock_of_simulated_events
    for _ in range(4):
        clock._request_batch(DATA)
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedEvent, "is_capturing", True)
            clock.enter(FORWARD)
            clock.enter(BACKWARD)
            clock.enter(STEP)
        clock.optimizer_stepped()
    assert len(clock.collect()) == 3


def test_a_cpu_is_measured_by_the_host() -> None:
    assert type(clock_for(torch.device("cpu"))) is PhaseClock
