"""Progress is silent while things are quick, and says how far it is when they are not."""

from __future__ import annotations

import re
import time

import pytest

from meshwright import PartialState
from meshwright.runtime.loop import progress as module
from meshwright.runtime.loop.progress import progress, while_slow


def test_quick_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(5), "Reading")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_slow_work_shows_a_bar_that_ends_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "_BETWEEN_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress(range(4), "Reading", unit="samples")) == [0, 1, 2, 3]
    shown = capsys.readouterr().err.split("\r")
    assert "2/4 samples" in shown[2]
    assert shown[-1].startswith("Reading  " + "█" * 30 + " 4/4 samples")
    assert shown[-1].endswith("\n")


def test_a_log_file_gets_whole_lines_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    assert len(list(progress(range(100), "Reading"))) == 100
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert [line.split()[2] for line in shown.splitlines()] == ["1/100", "100/100"]


def test_a_slow_block_is_described_while_it_runs_and_at_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.05)
    monkeypatch.setattr(module, "_BETWEEN_SECONDS_IN_A_FILE", 0.0)
    monkeypatch.setattr(module, "_BETWEEN_SECONDS", 0.05)
    written, asked = [0], [0]

    def describe() -> str:
        asked[0] += 1
        return f"Saving: {written[0]} MB"

    with while_slow(describe):
        for amount in (0, 7):
            written[0] = amount
            before = asked[0]
            while asked[0] < before + 2:  # the second time, it is described as it is now
                time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Saving: 0 MB, ")
    assert re.fullmatch(r"Saving: 7 MB, \d+ s: done", lines[-1])


def test_a_quick_block_is_not_described(capsys: pytest.CaptureFixture[str]) -> None:
    with while_slow(lambda: "Saving"):
        pass
    assert capsys.readouterr().err == ""


def test_other_processes_of_a_host_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(PartialState(cpu=True)._runtime, "local_process_index", 1)
    assert list(progress(range(3), "Reading")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
