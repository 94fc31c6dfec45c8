"""Progress is silent while things are quick, and says how far it is when they are not."""

from __future__ import annotations

import pytest

from accelerate import PartialState
from accelerate.runtime import progress as module
from accelerate.runtime.progress import progress


def test_quick_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(5), "Reading")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_slow_work_shows_a_bar_that_ends_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "_BETWEEN_SECONDS", 0.0)
    assert list(progress(range(4), "Reading", unit="samples")) == [0, 1, 2, 3]
    shown = capsys.readouterr().err.split("\r")
    assert "2/4 samples" in shown[2]
    assert shown[-1].startswith("Reading  " + "█" * 30 + " 4/4 samples")
    assert shown[-1].endswith("\n")


def test_other_processes_of_a_host_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(PartialState(cpu=True)._runtime, "local_process_index", 1)
    assert list(progress(range(3), "Reading")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
