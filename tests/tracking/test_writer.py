"""A tracker that raises, blocks or meets a full disk: training goes on, and one message says what happened."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, GeneralTracker
from meshwright.tracking import writer
from tests.timing import limit


class Scripted(GeneralTracker):
    """Do what the test says when a record arrives."""

    name = "scripted"
    requires_logging_directory = False

    def __init__(self, act: Callable[[int], None] = lambda call: None) -> None:
        super().__init__()
        self.act = act
        self.calls = 0
        self.got: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    @property
    def tracker(self) -> Scripted:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls += 1
        self.act(self.calls)
        self.got.append((step, values))

    def finish(self) -> None:
        self.finished += 1


class OnTheTrainingThread(Scripted):
    in_background = False


def raising(error: Exception, *calls: int) -> Callable[[int], None]:
    def act(call: int) -> None:
        if call in calls or not calls:
            raise error

    return act


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_DELAYS", (0.01, 0.02))


def begun(tracker: GeneralTracker, **options: Any) -> Accelerator:
    accelerator = Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("project", **options)
    return accelerator


def test_records_arrive_once_and_in_order() -> None:
    tracker = Scripted()
    accelerator = begun(tracker)
    for step in range(500):
        accelerator.log({"loss": torch.tensor(float(step))}, step=step)
    accelerator.end_training()
    assert tracker.got == [(step, {"loss": float(step)}) for step in range(500)]
    assert tracker.finished == 1


def test_a_value_is_taken_as_it_was_when_it_was_logged() -> None:
    tracker = Scripted(lambda call: time.sleep(0.05))
    accelerator = begun(tracker)
    total, histogram = torch.zeros(()), torch.zeros(3)
    accelerator.log({"total": total, "histogram": histogram, "inner": {"total": total}})
    total += 1
    histogram += 1
    accelerator.end_training()
    [(_, values)] = tracker.got
    assert values["total"] == 0.0
    assert values["histogram"].sum() == 0.0
    assert values["inner"]["total"] == 0.0


def test_a_lost_network_costs_nothing_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Scripted(raising(ConnectionError("no route"), 3, 4))
    accelerator = begun(tracker)
    for step in range(10):
        accelerator.log({"loss": step}, step=step)
    accelerator.trackers  # noqa: B018  waits for the records
    accelerator.end_training()
    assert [step for step, _ in tracker.got] == list(range(10))
    [message] = [record.getMessage() for record in caplog.records]
    assert "[rank 0] the tracker 'scripted' raised ConnectionError: no route. It is tried again" in message


def test_a_tracker_that_keeps_raising_is_disabled_and_its_losses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Scripted(raising(OSError("gone")))
    accelerator = begun(tracker)
    for step in range(10):
        accelerator.log({"loss": step}, step=step)
    accelerator.trackers  # noqa: B018  waits for the records
    accelerator.end_training()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3, messages
    assert "tried again" in messages[0]
    assert "Nothing more is logged there, and training continues." in messages[1]
    assert "missed 10 records" in messages[2]
    assert tracker.finished == 0


def test_a_record_the_tracker_cannot_take_is_left_out_and_the_next_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Scripted(raising(TypeError("no lists"), 2, 4))
    accelerator = begun(tracker)
    for step in range(1, 7):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    assert [step for step, _ in tracker.got] == [1, 3, 5, 6]
    messages = [record.getMessage() for record in caplog.records]
    assert "TypeError: no lists. The record is left out" in messages[0]
    assert "missed 2 records" in messages[1]
    assert len(messages) == 2


def test_an_error_of_a_custom_tracker_hints_at_threads(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = begun(Scripted(raising(ValueError("created in another thread"))))
    for step in range(4):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    assert "in_background = False" in caplog.text
    assert "refused 3 records in a row" in caplog.text


def test_a_run_that_cannot_be_closed_is_logged_unless_the_script_itself_has_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unfinished(Scripted):
        def finish(self) -> None:
            raise OSError("no network")

    begun(Unfinished()).end_training()
    assert "could not close its run: OSError: no network" in caplog.text
    caplog.clear()
    accelerator = begun(Unfinished())
    monkeypatch.setattr(
        sys, "last_value", KeyError("of the script"), raising=False
    )  # as Python does when it prints one
    accelerator.end_training()
    assert caplog.text == ""


def test_strict_raises_the_error_of_a_tracker() -> None:
    accelerator = begun(Scripted(raising(OSError("gone"))), strict=True)
    accelerator.log({"x": 1})

    def log_on() -> None:
        for step in range(2, 600):
            time.sleep(0.1)
            accelerator.log({"x": step})

    with pytest.raises(OSError, match="gone"):  # once the thread has written
        log_on()


def test_strict_raises_at_the_end_what_went_wrong_with_the_last_record() -> None:
    accelerator = begun(Scripted(raising(OSError("gone"))), strict=True)
    accelerator.log({"x": 1})
    with pytest.raises(OSError, match="gone"):
        accelerator.end_training()


def test_a_tracker_may_ask_for_the_training_thread() -> None:
    import threading

    threads: set[int] = set()
    tracker = OnTheTrainingThread(lambda call: threads.add(threading.get_ident()))
    accelerator = begun(tracker)
    accelerator.log({"x": 1})
    assert threads == {threading.get_ident()}
    accelerator.end_training()


def test_an_error_on_the_training_thread_does_not_end_training_either(caplog: pytest.LogCaptureFixture) -> None:
    tracker = OnTheTrainingThread(raising(OSError("gone")))
    accelerator = begun(tracker)
    accelerator.log({"x": 1})
    accelerator.log({"x": 2})
    assert tracker.calls == 1
    assert "training continues" in caplog.text
    with pytest.raises(OSError, match="gone"):
        begun(OnTheTrainingThread(raising(OSError("gone"))), strict=True).log({"x": 1})


def test_a_tracker_that_blocks_does_not_make_the_loop_wait() -> None:
    tracker = Scripted(lambda call: time.sleep(1))
    accelerator = begun(tracker)
    slowest = 0.0
    for step in range(5):
        before = time.perf_counter()
        accelerator.log({"loss": torch.tensor(1.0)}, step=step)
        slowest = max(slowest, time.perf_counter() - before)
    assert slowest < limit(0.05)
    accelerator.end_training()
    assert len(tracker.got) == 5


def test_asking_for_the_tracker_waits_for_what_was_logged_before() -> None:
    tracker = Scripted(lambda call: time.sleep(0.02))
    accelerator = begun(tracker)
    for step in range(5):
        accelerator.log({"x": step}, step=step)
    assert len(accelerator.get_tracker("scripted").got) == 5
    accelerator.end_training()


def test_a_tracker_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(writer, "SECONDS_TO_FINISH", 0.2)
    tracker = Scripted(lambda call: release.wait(60) and None)  # type: ignore[arg-type, return-value]
    accelerator = begun(tracker)
    for step in range(3):
        accelerator.log({"x": step}, step=step)
    before = time.monotonic()
    accelerator.end_training()
    release.set()
    assert time.monotonic() - before < limit(5)
    assert "still has 3 records" in caplog.text
    assert "did not take the last 3 records in time" in caplog.text


class OnAServer(Scripted):
    is_remote = True


def test_a_server_that_is_too_slow_loses_records_and_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MAX_BACKLOG", 3)
    tracker = OnAServer(lambda call: time.sleep(0.1))
    accelerator = begun(tracker)
    for step in range(20):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    assert "is too slow" in caplog.text
    assert f"missed {20 - len(tracker.got)} records" in caplog.text
    assert len(tracker.got) in (3, 4)


@pytest.mark.parametrize("name", ["jsonl", "scripted"])
def test_a_tracker_without_a_server_loses_nothing_in_a_tight_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(writer, "MAX_BACKLOG", 50)
    accelerator = Accelerator(log_with=name if name == "jsonl" else Scripted(), project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("project")
    for step in range(5000):
        accelerator.log({"loss": step}, step=step)
    tracker = accelerator.get_tracker(name)
    accelerator.end_training()
    if name == "jsonl":
        records = map(json.loads, Path(tracker.path).read_text().splitlines())
        got = [(record["step"], record["values"]) for record in records if "values" in record]
    else:
        got = tracker.got
    assert got == [(step, {"loss": step}) for step in range(5000)]
    assert caplog.text == ""


def test_waiting_for_a_local_tracker_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MAX_BACKLOG", 3)
    monkeypatch.setattr(writer, "SECONDS_BEFORE_WAIT_WARNING", 0.05)
    tracker = Scripted(lambda call: time.sleep(0.1))
    accelerator = begun(tracker)
    for step in range(8):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    assert len(tracker.got) == 8
    [message] = [record.getMessage() for record in caplog.records]
    assert "is slower than the run: 3 records wait for it, and log() waits too" in message


def test_log_does_not_wait_for_a_local_tracker_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_BACKLOG", 3)
    monkeypatch.setattr(writer, "RETRY_DELAYS", (0.5,))
    tracker = Scripted(raising(OSError("gone")))
    accelerator = begun(tracker)
    accelerator.log({"x": 0})
    while not tracker.calls:
        time.sleep(0.001)
    before = time.monotonic()
    for step in range(1, 1000):  # while it is tried again
        accelerator.log({"x": step})
    assert time.monotonic() - before < limit(0.4)
    accelerator.trackers  # noqa: B018  waits until it is disabled
    before = time.monotonic()
    for step in range(1000):
        accelerator.log({"x": step})
    assert time.monotonic() - before < limit(0.4)
    accelerator.end_training()
    assert accelerator._trackers._lost_records() == {"scripted": 2000}


def test_what_another_tracker_lost_is_in_the_file(tmp_path: Path) -> None:
    refusing = Scripted(raising(TypeError("no lists"), 2, 4))
    accelerator = Accelerator(log_with=["jsonl", refusing], project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("project")
    for step in range(1, 7):
        accelerator.log({"x": step}, step=step)
    path = accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.end_training()
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [record["lost"] for record in records if "lost" in record][-1] == {"scripted": 2}
    assert "end" in records[-1]


@pytest.mark.parametrize("error", [TypeError("no such option"), ConnectionError("no route")])
def test_a_wrong_call_at_the_start_is_raised_and_a_lost_network_is_not(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Unstartable(Scripted):
        def start(self) -> None:
            raise error

    if isinstance(error, TypeError):
        with pytest.raises(TypeError, match="no such option"):
            begun(Unstartable())
        return
    accelerator = begun(Unstartable())
    accelerator.log({"x": 1})
    assert "could not start: ConnectionError: no route. Nothing more is logged there" in caplog.text
    with pytest.raises(ConnectionError):
        begun(Unstartable(), strict=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path, cpu=True)
    accelerator.init_trackers("project")
    tracker = accelerator.get_tracker("jsonl")
    os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._file)
    for step in range(10):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    assert "No space left on device" in caplog.text
    assert "training continues" in caplog.text
