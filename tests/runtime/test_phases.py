"""The clock of the training thread: what counts as a step, what as which phase, and what it costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator
from meshwright.runtime import phases
from meshwright.runtime.phases import BACKWARD, DATA, FORWARD, OTHER, SAVING, STEP, WAITING, PhaseClock
from tests.ranks import ranks

PAUSE = 0.01


def slowly(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(PAUSE)
        yield number


class Loader:
    phase = DATA


def loop(clock: PhaseClock, batches: Iterator[int], phase: int = DATA) -> Iterator[int]:
    """Tell a clock of a loop, as a prepared loader does."""
    clock.epoch_started(Loader)
    for batch in batches:
        clock.body_started(Loader, batch)
        yield batch
        clock.body_ended(Loader)
    clock.epoch_ended(Loader, True)


def steps_of(clock: PhaseClock) -> list[list[float]]:
    assert [number for number, _ in clock.rows] == list(range(len(clock.rows)))
    return [seconds for _, seconds in clock.rows]


def optimize(clock: PhaseClock) -> None:
    clock.enter(BACKWARD)
    clock.enter(OTHER)
    clock.enter(STEP)
    time.sleep(PAUSE)
    clock.optimizer_stepped()


def test_a_step_ends_when_the_next_batch_is_asked_for() -> None:
    clock = PhaseClock()
    for _ in loop(clock, slowly(3), DATA):
        time.sleep(2 * PAUSE)
        optimize(clock)
    first, second, third = steps_of(clock)
    assert PAUSE <= second[DATA] < third[DATA] + PAUSE
    assert second[FORWARD] >= 2 * PAUSE
    assert second[STEP] >= PAUSE
    assert second[BACKWARD] < PAUSE
    assert second[SAVING] == second[WAITING] == 0
    assert first[DATA] >= PAUSE, "the first batch is counted too"


def test_micro_batches_and_several_optimizers_make_one_step() -> None:
    clock = PhaseClock()
    for number in loop(clock, slowly(6), DATA):
        if number % 3 == 2:
            optimize(clock)
            optimize(clock)
    # Until an optimizer steps for the first time nobody knows that there is one.
    assert [round(seconds[STEP] / PAUSE) >= 2 for seconds in steps_of(clock)] == [False, False, True, True]
    assert steps_of(clock)[-1][DATA] >= 3 * PAUSE


def test_without_an_optimizer_a_batch_is_a_step_and_without_a_loader_a_step_of_the_optimizer() -> None:
    clock = PhaseClock()
    assert len(list(loop(clock, slowly(3), DATA))) == 3
    assert len(clock.rows) == 3
    clock = PhaseClock()
    for _ in range(3):
        optimize(clock)
    assert len(clock.rows) == 3


def test_another_thread_has_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PhaseClock()
    phases.start(clock)
    taken: list[int] = []

    def elsewhere() -> None:
        taken.extend(loop(clock, slowly(3), DATA))
        with phases.during(SAVING):
            time.sleep(PAUSE)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with phases.during(SAVING):
        time.sleep(PAUSE)
    optimize(clock)
    phases.stop(clock)
    assert taken == [0, 1, 2]
    (seconds,) = steps_of(clock)
    assert seconds[DATA] == 0
    assert PAUSE <= seconds[SAVING] < seconds[OTHER]


def test_what_is_not_read_does_not_pile_up() -> None:
    clock = PhaseClock()
    for _ in loop(clock, iter(range(20_000)), DATA):
        pass
    assert len(clock.rows) < 10_000
    assert clock.rows[-1][0] == 19_999


def test_a_change_of_phase_costs_far_below_a_microsecond() -> None:
    clock = PhaseClock()

    def nothing(phase: int) -> None: ...

    def fastest(function: Callable[[int], object]) -> float:
        def burst() -> float:
            start = time.perf_counter()
            for _ in range(200):
                function(FORWARD)
            return (time.perf_counter() - start) / 200

        return min(burst() for _ in range(500))

    # Compared with an empty call, because other programs may run here as well.
    cost, call = fastest(clock.enter), fastest(nothing)
    assert cost < max(0.5e-6, 10 * call), f"{cost * 1e9:.0f} ns, an empty call {call * 1e9:.0f} ns"


def test_nobody_is_clocked_on_one_process() -> None:
    Accelerator(cpu=True)
    assert phases.clock is None


@ranks(2)
def test_a_prepared_loop_is_clocked() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    )
    watched, clock = phases.clock, PhaseClock()  # one that the watcher does not read
    phases.start(clock)
    for (batch,) in loader:
        loss = net(batch).sum()
        accelerator.backward(loss)
        accelerator.gather(loss)
        optimizer.step()
        optimizer.zero_grad()
    phases.start(watched)
    assert len(steps_of(clock)) == 4
    for seconds in steps_of(clock):
        assert all(seconds[phase] > 0 for phase in (DATA, FORWARD, BACKWARD, WAITING, STEP, OTHER))
        assert seconds[SAVING] == 0
    accelerator.end_training()
    assert phases.clock is None
