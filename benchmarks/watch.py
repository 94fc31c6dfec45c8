"""The watcher: a step with it and without it, what it and its comparison of ranks cost, the store with 10,000 ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.optim import SGD
from torch.utils.data import DataLoader

from .contenders.accelerate import steps as our_steps
from .interleave import Comparison, Lap, compare, timed
from .processes import run_on_two
from .store_load import load_of_the_store, seconds_of_a_round
from .task import BATCH_SIZE, data, model

SECONDS_OF_HEALTH = 12.0
RANKS = 10_000
LOOKS = 200


def run(rounds: int) -> list[Comparison]:
    """Measure steps, then the store."""
    rows = run_on_two(on_every_rank, rounds)
    reports = f"the reports of {RANKS:,} stuck ranks, written, read and decided on: {seconds_of_a_round(RANKS):.1f} s"
    return [replace(rows[0], notes=[*rows[0].notes, str(load_of_the_store(RANKS)), reports])]


def on_every_rank(rounds: int) -> list[Comparison]:
    from meshwright import PartialState, watch
    from meshwright.runtime import phases

    PartialState()  # starts the watcher
    watcher: Any = watch._running
    going = threading.Event()
    going.set()
    ask, look, compare_steps = watcher._poll, watcher._observer.sample, watcher._exchange.poll
    asked: list[float] = []

    def ask_only_when_going() -> None:
        if going.is_set():
            asked.append(time.monotonic())
            ask()

    def look_only_when_going() -> float:
        return look() if going.is_set() else 0.0

    def compare_only_when_going() -> None:
        if going.is_set():
            compare_steps()

    watcher._poll, watcher._observer.sample = ask_only_when_going, look_only_when_going
    watcher._exchange.poll = compare_only_when_going

    def with_watcher() -> None:
        phases.clock = watcher._clock
        going.set()

    def without() -> None:
        phases.clock = None
        going.clear()

    def lap_of(switch: Callable[[], None]) -> Lap:
        net = model()
        step = timed(
            our_steps(net, SGD(net.parameters(), 0.1), DataLoader(data(), batch_size=BATCH_SIZE)), dist.barrier
        )

        def lap() -> float:
            switch()
            return step()

        return lap

    row = compare(
        "DDP step with the watcher / without, 2 processes",
        lambda: lap_of(without),
        lambda: lap_of(with_watcher),
        rounds=rounds,
        target=1.01,
    )
    with_watcher()
    asked.clear()
    time.sleep(SECONDS_OF_HEALTH)
    per_minute = len(asked) * 60 / SECONDS_OF_HEALTH
    going.clear()
    start = time.thread_time()
    for _ in range(LOOKS):
        look()
        ask()
    cost = (time.thread_time() - start) / LOOKS
    comparison = cost_of_a_comparison(watcher, compare_steps)
    with_watcher()
    return [
        replace(
            row,
            notes=[
                f"{per_minute:.0f} questions per rank and minute in health, of one key each",
                f"one look and one question cost {cost * 1e6:.0f} us of CPU: {cost / watcher._period:.4%} of a core",
                f"comparing the steps of both ranks costs {comparison * 1e6:.0f} us of CPU on rank 0, at most every "
                f"{watcher._exchange.period:.1f} s: {comparison / watcher._exchange.period:.4%} of a core",
            ],
        )
    ]


def cost_of_a_comparison(watcher: Any, compare_steps: Callable[[], None]) -> float:
    """Clock a window of steps again and again, tell it, and on rank 0 read and compare what both told."""
    clock, exchange = watcher._clock, watcher._exchange
    taken = []
    for _ in range(LOOKS):
        for _ in range(exchange._windows.length):
            clock._seconds[0] = 0.1  # as if it had been: fast steps make longer windows
            clock._end_step()
        exchange._next_poll = 0.0
        start = time.thread_time()
        compare_steps()
        taken.append(time.thread_time() - start)
    return sorted(taken)[LOOKS // 2]
