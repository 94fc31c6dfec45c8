"""Slow ranks: named with rank and phase, in time, and nobody else ever."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from meshwright import Accelerator
from meshwright.runtime import phases
from meshwright.runtime.phases import BACKWARD, DATA, FORWARD, NAMES, STEP, PhaseClock
from meshwright.tools.report.runs.finding import read_runs
from meshwright.tools.report.terminal.ranks import WatchFrame, watched_run
from meshwright.watch.stragglers.detection import CONSECUTIVE, SlowRank, StragglerDetector, Window, slow_ranks
from meshwright.watch.stragglers.exchange import StepTimeExchange
from meshwright.watch.stragglers.windows import FEWEST_STEPS, FIELDS, KEPT, Windows, summary, unpack
from tests.ranks import run_on_ranks

SLOW_RANK = 2
SECONDS_OF_DATA, SECONDS_OF_FORWARD = 0.03, 0.025
SLOW_IN_DATA, SLOW_IN_FORWARD = (23, 83), (136, 196)
STEPS = 200


class Samples(Dataset[Any]):
    """Samples that take their time."""

    def __init__(self, rank: int, jitter: float, slow: tuple[int, int]) -> None:
        self.rank, self.jitter, self.slow = rank, jitter, slow
        self.step = 0
        self.random = random.Random(rank)

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work(SECONDS_OF_DATA, self.slow)
        self.step += 1
        return torch.ones(4)

    def work(self, seconds: float, slow: tuple[int, int]) -> None:
        slowed = 1.3 if self.rank == SLOW_RANK and slow[0] <= self.step < slow[1] else 1.0
        time.sleep(seconds * slowed * (1 + self.random.uniform(-self.jitter, self.jitter)))


class Warnings(logging.Handler):
    """Record the messages, and the step of each."""

    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((self.samples.step, record.getMessage()))


def train(folder: Path, jitter: float, in_data: tuple[int, int], in_forward: tuple[int, int]) -> list[tuple[int, str]]:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("slow", init_kwargs={"jsonl": {"run": "run"}})
    samples = Samples(accelerator.process_index, jitter, in_data)
    warned = Warnings(samples)
    logging.getLogger("meshwright.watch.stragglers.exchange").addHandler(warned)
    model = torch.nn.Linear(4, 2)
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(samples, batch_size=1)
    )
    for step, batch in enumerate(loader):
        samples.work(SECONDS_OF_FORWARD, in_forward)
        loss = net(batch).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    assert phases.run_folder is None
    return warned.messages


def warning(phase: str) -> str:
    return (
        rf"Rank {SLOW_RANK} is slow in {phase}: 0\.0\d\d s per step, where the others need 0\.0\d\d s\. "
        r"It costs the run \d+% of every step\."
    )


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "slow" / "run" / name).read_text().splitlines()]


def test_a_slow_rank_is_named_within_50_steps_with_its_phase_and_when_it_is_over(tmp_path: Path) -> None:
    warned = run_on_ranks(4, train, folder=tmp_path, jitter=0.0, in_data=SLOW_IN_DATA, in_forward=SLOW_IN_FORWARD)
    assert warned[1:] == [[], [], []], "only the first rank warns"
    (first, slow_data), (over, no_longer), (second, slow_forward) = warned[0]
    assert re.fullmatch(warning("waiting for data"), slow_data)
    assert SLOW_IN_DATA[0] < first <= SLOW_IN_DATA[0] + 50
    assert no_longer == f"Rank {SLOW_RANK} is no longer slow in waiting for data."
    assert SLOW_IN_DATA[1] < over <= SLOW_IN_DATA[1] + 50
    assert re.fullmatch(warning("the forward pass"), slow_forward)
    assert SLOW_IN_FORWARD[0] < second <= SLOW_IN_FORWARD[0] + 50

    found = [(record["step"], record["values"]) for record in logged(tmp_path, "metrics.jsonl") if "values" in record]
    carried = {step: values for step, values in found if "straggler/rank" in values}
    assert {values["straggler/rank"] for values in carried.values()} == {SLOW_RANK}
    assert {step: values["straggler/phase"] for step, values in carried.items()}.items() >= {
        (min(carried), "data"),
        (max(carried), "forward"),
    }
    assert all(0.05 < values["straggler/cost"] < 0.3 for values in carried.values())
    assert SLOW_IN_DATA[0] < min(carried) <= SLOW_IN_DATA[0] + 50

    lines = logged(tmp_path, "ranks.jsonl")
    assert lines[0]["of"] == 4
    assert list(lines[0]["ranks"]) == ["0", "1", "2", "3"]
    assert {line["straggler"]["phase"] for line in lines if "straggler" in line} == {"data", "forward"}
    assert len(lines) < STEPS / FEWEST_STEPS, "some windows share a line"
    run = watched_run([tmp_path])
    run.update()
    picture = WatchFrame(run, 120, 30).text(coloured=False, final=True)
    assert f"→    {SLOW_RANK}  ddd" in picture
    assert slow_forward[:40] in picture
    assert len(read_runs([tmp_path])) == 1, "ranks.jsonl is no run of its own"


def test_jitter_of_20_percent_is_nobodys_fault(tmp_path: Path) -> None:
    warned = run_on_ranks(4, train, folder=tmp_path, jitter=0.2, in_data=(0, 0), in_forward=(0, 0))
    assert warned == [[], [], [], []]
    assert not any("straggler" in line for name in ("metrics.jsonl", "ranks.jsonl") for line in logged(tmp_path, name))
    assert len(logged(tmp_path, "ranks.jsonl")) > 2


# --- the judgement, from times alone ---------------------------------------------------------------------------------


def steps(**seconds: float) -> list[list[float]]:
    return [[seconds.get(name, 0.0) for name in NAMES] for _ in range(FEWEST_STEPS)]


def judged(*ranks: list[list[float]]) -> list[SlowRank]:
    return slow_ranks(np.arange(len(ranks)), np.stack([summary(0, rows) for rows in ranks]))


USUAL = {"data": 0.1, "forward": 0.05, "backward": 0.1, "step": 0.01, "other": 0.01}


@pytest.mark.parametrize(("name", "phase"), [("data", DATA), ("forward", FORWARD), ("step", STEP)])
def test_the_excess_over_the_others_is_the_cost(name: str, phase: int) -> None:
    slow = {**USUAL, name: USUAL[name] + 0.03, "backward": 0.07}
    (finding,) = judged(steps(**USUAL), steps(**slow), steps(**USUAL))
    assert (finding.rank, finding.phase) == (1, phase)
    assert finding.cost == pytest.approx(0.03 / 0.27)
    assert (finding.seconds, finding.usual) == pytest.approx((USUAL[name] + 0.03, USUAL[name]))


def test_nobody_is_blamed_for_waiting_or_saving() -> None:
    for name in ("backward", "waiting", "saving"):
        assert judged(steps(**USUAL), steps(**{**USUAL, name: 0.5}), steps(**USUAL)) == []


def test_little_is_not_slow() -> None:
    assert judged(steps(**USUAL), steps(**{**USUAL, "step": 0.02})) == [], "twice as long, 4 % of the step"
    assert judged(steps(**USUAL), steps(**{**USUAL, "data": 0.114})) == [], "5 % of the step, 14 % of the phase"
    assert judged(steps(data=0.001), steps(data=0.0019)) == [], "0.9 ms"


def test_of_two_the_one_that_waits_in_its_forward_pass_is_not_blamed() -> None:
    slow, waits = steps(**{**USUAL, "data": 0.15}), steps(**{**USUAL, "forward": 0.1})
    assert [(finding.rank, finding.phase) for finding in judged(slow, waits)] == [(0, DATA)]


def test_some_slow_steps_do_not_make_a_slow_rank() -> None:
    rows = steps(**USUAL)
    for row in rows[:4]:
        row[DATA] = 5.0
    assert judged(steps(**USUAL), rows, steps(**USUAL), steps(**USUAL)) == []


@pytest.mark.parametrize("world_size", [2, 4, 512])
def test_chance_names_nobody(world_size: int) -> None:
    detector, windows = StragglerDetector(), 8 if world_size == 512 else 400
    chance = np.random.default_rng(0)
    row = np.array([USUAL.get(name, 0.0) for name in NAMES])
    for number in range(windows):
        times = row * chance.uniform(0.8, 1.2, (world_size, FEWEST_STEPS, len(row)))
        summaries = np.stack([summary(number, list(rank)) for rank in times])
        table = np.repeat(summaries[:, None], KEPT, axis=1)
        table[:, :-1, 0] = -1
        (window,) = detector.update(table)
        assert window.finding is None


def publish(
    detector: StragglerDetector, windows: list[Windows], first: int, seconds: list[dict[str, float]]
) -> list[SlowRank | None]:
    for rank, times in enumerate(seconds):
        windows[rank].consume(deque((first + i, row) for i, row in enumerate(steps(**times))))
    return [window.finding for window in detector.update(unpack(rank.pack() for rank in windows))]


def test_a_finding_takes_some_windows_and_so_does_its_end() -> None:
    detector, windows = StragglerDetector(), [Windows() for _ in range(4)]
    slow = [USUAL, USUAL, USUAL, {**USUAL, "forward": 0.1}]
    findings = [publish(detector, windows, number * FEWEST_STEPS, slow)[0] for number in range(CONSECUTIVE)]
    assert [finding is not None for finding in findings] == [False] * (CONSECUTIVE - 1) + [True]
    begun = CONSECUTIVE * FEWEST_STEPS
    findings = [
        publish(detector, windows, begun + number * FEWEST_STEPS, [USUAL] * 4)[0] for number in range(CONSECUTIVE)
    ]
    assert [finding is not None for finding in findings] == [True] * (CONSECUTIVE - 1) + [False]


def test_windows_wait_for_the_rank_that_publishes_last_but_not_for_one_that_stopped() -> None:
    detector, windows = StragglerDetector(), [Windows() for _ in range(3)]
    publish(detector, windows, 0, [USUAL] * 3)
    assert publish(detector, windows, FEWEST_STEPS, [USUAL] * 2) == [], "rank 2 has not published"
    windows[2].consume(deque((FEWEST_STEPS + i, row) for i, row in enumerate(steps(**USUAL))))
    assert publish(detector, windows, 2 * FEWEST_STEPS, []) == [None]
    findings = [publish(detector, windows, number * FEWEST_STEPS, [USUAL] * 2) for number in range(2, 4 + KEPT)]
    assert findings[0] == []
    assert findings[-1] == [None]


def test_windows_of_another_length_begin_at_the_same_steps_on_every_rank() -> None:
    early, late = Windows(), Windows()
    rows = [(number, [float(number)] + [0.0] * (len(NAMES) - 1)) for number in range(100)]
    for window, change in ((early, 13), (late, 27)):
        window.consume(deque(rows[:change]))
        window.resize(20)
        assert window.consume(deque(rows[change:]))
    assert np.array_equal(early.newest, late.newest)
    assert early.newest[1] == 20
    assert early.newest[3 + BACKWARD] == 0


def test_rank_0_makes_windows_of_fast_steps_longer_and_of_slow_ones_short_again() -> None:
    clock, store = PhaseClock(), dist.HashStore()
    exchange = StepTimeExchange(clock, store, rank=0, world_size=2)
    fast, slow = [0.001] + [0.0] * (len(NAMES) - 1), [0.5] + [0.0] * (len(NAMES) - 1)
    lengths = []
    for first, row in ((0, fast), (2560, slow)):
        exchange._next_poll = 0.0  # whatever the time
        clock.rows.extend((first + number, row) for number in range(2560))
        exchange.poll()
        lengths.append(int(store.get("phases/length")))
    assert lengths == [2560, FEWEST_STEPS]
    clock.rows.extend((number, [1e-6] * len(NAMES)) for number in range(5120, 5130))
    exchange._next_poll = 0.0
    exchange.poll()
    assert int(store.get("phases/length")) < (clock.rows.maxlen or 0), "it can be completed"
    assert len(store.get("phases/0")) == KEPT * 17 * 8, "what a rank publishes does not grow"


def test_windows_of_members_carry_their_own_names() -> None:
    finding = SlowRank(rank=2, phase=phases.DATA, seconds=0.2, usual=0.1, cost=0.5, also=(1,))
    window = Window(ranks=[0, 1, 2], rows=np.zeros((3, FIELDS)), finding=finding).renamed((0, 2, 5))
    assert window.ranks == [0, 2, 5]
    assert str(window.finding).startswith("Rank 5 is slow in waiting for data")
    assert str(window.finding).endswith("Rank 2 too.")
