"""What `python -m benchmarks.kills` counts, from logs that are written here; and a small training that is killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kills.__main__ import train
from benchmarks.kills.counting import Run, row
from benchmarks.kills.task import REPLICAS, SAMPLES, SHARE, batch_of

STEPS = SAMPLES // (REPLICAS * SHARE)


def write(folder: Path, replica: int, pid: int, lines: list[tuple[int, float, list[int]]], end: float = 0.0) -> None:
    entries = [{"replica": replica, "pid": pid, "time": lines[0][1]}]
    entries += [{"step": step, "time": time, "samples": [[0, number] for number in ids]} for step, time, ids in lines]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / f"log_{replica}_{pid}").write_text(text + '{"half a li')
    torch.save(torch.tensor([1.0, end]), folder / f"end_{replica}")


def test_a_batch_of_every_replica_in_every_step_is_an_epoch() -> None:
    numbers = [n for step in range(STEPS) for replica in range(REPLICAS) for n in batch_of(step, replica)[2].tolist()]
    assert sorted(numbers) == list(range(SAMPLES))


def test_losses_are_counted_from_the_logs(tmp_path: Path) -> None:
    write(tmp_path, 0, os.getpid(), [(step, 10.0 + step + 4 * (step > 3), [step]) for step in range(1, 8)])
    write(tmp_path, 1, 2**22 + 1, [(1, 10.9, [11]), (2, 12.5, [12])], end=0.5)
    write(tmp_path, 1, 2**22 + 2, [(2, 19.0, [12]), (7, 21.0, [])], end=0.5)
    run = Run.read(tmp_path)
    assert run.newest_step == 7
    assert run.training() == {0: os.getpid()}, "the other process is not there any more"
    assert run.seconds() == pytest.approx(10.1)
    assert run.seconds_without_step() == pytest.approx(4.0)
    assert run.samples().total() - len(run.samples()) == 1
    assert run.difference(run) == 0.5
    cells = [cell.strip() for cell in row("ours", run, run, STEPS).split("|")]
    assert cells[4:] == [f"{SAMPLES - 9:,} of {SAMPLES:,}", "1", "5.0e-01", "5.0e-01", ""]


@pytest.mark.nightly
def test_a_rank_is_killed_and_ours_loses_nothing(tmp_path: Path) -> None:
    healthy = train("ours", Path(sys.executable), tmp_path / "healthy", STEPS, [])
    killed = train("ours", Path(sys.executable), tmp_path / "killed", STEPS, [(10, 1)])
    first = next(log for log in killed.logs if log[0]["replica"] == 1)
    assert first[-1]["step"] < STEPS == killed.newest_step
    assert set(killed.samples().values()) == {1}
    assert len(killed.samples()) == SAMPLES
    assert killed.difference(healthy) < 1e-5
