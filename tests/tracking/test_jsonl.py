from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator
from meshwright.tracking import JSONLTracker
from meshwright.tracking.writer import LoggedRecord
from tests.timing import limit


def records(path: str | Path) -> list[dict[str, Any]]:
    """Read strictly: NaN is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    with open(path, encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def begun(folder: Path, run: str = "run", **options: Any) -> tuple[Accelerator, str]:
    accelerator = Accelerator(log_with="jsonl", project_dir=folder, cpu=True)
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"run": run}}, **options)
    return accelerator, accelerator.get_tracker("jsonl", unwrap=True)


def test_a_run_is_a_file_of_strict_json(tmp_path: Path) -> None:
    accelerator, path = begun(tmp_path, config={"lr": 0.1, "folder": tmp_path, "best": math.inf})
    accelerator.log({"loss": torch.tensor(0.5), "bad": math.nan, "note": "hällo"}, step=7)
    accelerator.log({"loss": 0.25})
    accelerator.end_training()
    assert path == str(tmp_path / "project" / "run" / "metrics.jsonl")
    start, config, *logged, end = records(path)
    [system] = [record for record in logged if "system" in record]  # after the first or the second
    first, second = (record for record in logged if "values" in record)
    assert start["start"]["project"] == "project"
    assert start["start"]["processes"] == 1
    assert config == {"config": {"lr": 0.1, "folder": str(tmp_path), "best": "Infinity"}}
    assert first["step"] == 7
    assert first["values"] == {"loss": 0.5, "bad": "NaN", "note": "hällo"}
    assert system["system"]["memory/host"] > 10_000_000
    assert (second["step"], second["values"]) == (8, {"loss": 0.25})
    assert end["end"]["time"] >= second["time"] >= first["time"] >= start["start"]["time"]


def test_without_a_folder_runs_go_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(log_with="jsonl", cpu=True)
    accelerator.init_trackers("project")
    accelerator.end_training()
    [path] = tmp_path.glob("runs/project/*/metrics.jsonl")
    assert path.parent.name[:2] == "20"  # named by the time it started


def test_a_line_that_a_crash_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    accelerator, path = begun(tmp_path)
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:-9])
    accelerator, _ = begun(tmp_path)
    accelerator.end_training()
    lines = Path(path).read_text().splitlines()
    readable = []
    for line in lines:
        try:
            readable.append(next(iter(json.loads(line))))
        except ValueError:
            readable.append("torn")
    assert readable == ["start", "step", "step", "torn", "start", "end"]


def test_a_line_that_another_run_is_writing_is_not_taken_for_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "project" / "run" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1, ')

    def go_on(seconds: float) -> None:
        with path.open("a") as file:
            file.write('"values": {}}\n')

    monkeypatch.setattr("meshwright.tracking.jsonl.time.sleep", go_on)
    tracker = JSONLTracker("project", tmp_path, run="run")
    tracker.start()
    tracker.finish()
    assert [next(iter(record)) for record in records(path)] == ["step", "start", "end"]


def test_two_runs_at_once_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    program = f"""
from meshwright.tracking import JSONLTracker
tracker = JSONLTracker("project", {str(tmp_path)!r}, run="run")
tracker.start()
for step in range(500):
    tracker.log({{"text": "x" * 3000}}, step=step)
tracker.finish()
"""
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert sum("values" in record for record in records(tmp_path / "project" / "run" / "metrics.jsonl")) == 1000


def test_a_killed_run_keeps_every_record_that_was_taken_over(tmp_path: Path) -> None:
    program = f"""
import sys
from meshwright.tracking import JSONLTracker
tracker = JSONLTracker("project", {str(tmp_path)!r}, run="run")
tracker.start()
for step in range(10_000_000):
    tracker.log({{"loss": step}}, step=step)
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 300:
            os.kill(process.pid, signal.SIGKILL)
            break
    printed = [300, *map(int, process.stdout.read().split())]
    process.wait()
    steps = [record["step"] for record in records(tmp_path / "project" / "run" / "metrics.jsonl") if "values" in record]
    assert steps == list(range(len(steps)))
    assert len(steps) >= printed[-1] + 1


def test_a_disk_that_takes_a_part_stores_every_record_once_when_there_is_room(tmp_path: Path) -> None:
    tracker = JSONLTracker("project", tmp_path)
    tracker.start()
    out, into = os.pipe()  # takes 64 KiB, and then refuses
    os.set_blocking(into, False)
    os.dup2(into, tracker._file)
    waiting = deque(LoggedRecord({"text": "x" * 3000, "step": step}, step, {}) for step in range(40))
    with pytest.raises(BlockingIOError):
        tracker.log_all(waiting)
    assert 0 < len(waiting) < 40
    written = os.read(out, 1 << 20)
    tracker.log_all(waiting)
    assert not waiting
    steps, torn = [], 0
    for line in (written + os.read(out, 1 << 20)).splitlines():
        try:
            steps.append(json.loads(line).get("values", {}).get("step"))
        except ValueError:
            torn += 1
    assert [step for step in steps if step is not None] == list(range(40))
    assert torn == 1


class Doubling(JSONLTracker):
    name = "doubling"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log({name: 2 * value for name, value in values.items()}, step=step, **kwargs)


def test_a_subclass_with_its_own_log_is_asked(tmp_path: Path) -> None:
    tracker = Doubling("project", tmp_path)
    accelerator = Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("project")
    for step in range(20):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    logged = [record["values"]["x"] for record in records(tracker.path) if "values" in record]
    assert logged == list(range(0, 40, 2))


def test_a_record_that_no_file_can_hold_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, path = begun(tmp_path)
    for step in range(20):
        accelerator.log({"text": "\ud800" if step == 7 else "fine"}, step=step)
    accelerator.end_training()
    logged = [record["step"] for record in records(path) if "values" in record]
    assert logged == [step for step in range(20) if step != 7]
    assert "missed 1 record" in caplog.text
    assert [record["lost"] for record in records(path) if "lost" in record] == [{"jsonl": 1}]


def test_a_tracker_that_was_not_started_says_so(tmp_path: Path) -> None:
    tracker = JSONLTracker("project", tmp_path)
    with pytest.raises(ValueError, match=r"call start\(\) first"):
        tracker.log({"x": 1})
    tracker.finish()


def test_a_record_costs_microseconds(tmp_path: Path) -> None:
    tracker = JSONLTracker("project", tmp_path)
    tracker.start()
    before = time.perf_counter()
    for step in range(2000):
        tracker.log({"loss": 1.0, "lr": 0.1}, step=step)
    assert (time.perf_counter() - before) / 2000 < limit(1e-3)
    tracker.finish()
