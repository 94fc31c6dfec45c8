"""Run every benchmark in a bounded form: gross regressions show, noise does not."""

from __future__ import annotations

import itertools
import json
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import imports
from benchmarks.__main__ import main, measure_reference
from benchmarks.interleave import Comparison, compare, summary
from benchmarks.table import render

GENEROUS = 1.25
GENEROUS_FOR_TWO_PROCESSES = 1.5  # on two cores that others use too
TRIES = 3


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("subject", "bound"),
    [
        ("step", GENEROUS),
        ("ddp", GENEROUS_FOR_TWO_PROCESSES),
        ("fsdp", GENEROUS_FOR_TWO_PROCESSES),
        ("gather", GENEROUS_FOR_TWO_PROCESSES),
        ("loader", GENEROUS_FOR_TWO_PROCESSES),
        ("log", GENEROUS),
    ],
)
def test_a_subject_costs_little_and_prints_its_table(
    subject: str, bound: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    for tries_left in reversed(range(TRIES)):  # a regression shows every time, other tests on the same cores do not
        try:
            main([subject, "--rounds", "24", "--json", str(results)])
        except torch.multiprocessing.ProcessRaisedException as error:  # seen once, under load: keep what it says
            if tries_left == 0:
                raise
            warnings.warn(f"a rank of the {subject} benchmark failed and is tried again: {error}", stacklevel=1)
            continue
        rows = json.loads(results.read_text())
        printed = capsys.readouterr().out.splitlines()
        if all(row["target"] is None or row["ratio"] <= bound for row in rows):
            break
    assert printed[0].split() == [
        "what",
        "bare",
        "us",
        "ours",
        "us",
        "ratio",
        "95",
        "%",
        "interval",
        "target",
        "verdict",
    ]
    assert {len(line) for line in printed[: 2 + len(rows)]} == {len(printed[1])}
    for row, line in zip(rows, printed[2:], strict=False):
        assert line.startswith(row["what"])
        assert row["target"] is None or row["ratio"] <= bound, line


def test_importing_brings_only_what_the_library_depends_on() -> None:
    [row] = imports.run(rounds=1)
    assert row.ratio <= GENEROUS
    _, _, packages = row.notes[0].partition(": ")
    assert set(packages.split(", ")) <= {"accelerate", "numpy"}


def test_another_interpreter_measures_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_interpreter(command: list[str], **_: object) -> None:
        assert command[:-1] == ["/other/python", "-m", "benchmarks", "step", "--rounds", "7", "--json"]
        Path(command[-1]).write_text('[{"what": "step, SGD", "ratio": 1.5}]')

    monkeypatch.setattr(subprocess, "run", other_interpreter)
    assert measure_reference("/other/python", ["step"], rounds=7) == {"step, SGD": 1.5}


def test_the_ratio_is_that_of_the_laps() -> None:
    row = compare("laps", lambda: lambda: 2.0, lambda: lambda: 2.5, rounds=5)
    assert (row.ratio, row.low, row.high) == (1.25, 1.25, 1.25)
    assert (row.bare_us, row.ours_us) == (2e6, 2.5e6)


def test_interruptions_do_not_count() -> None:
    def interrupted(every: int) -> Iterator[float]:
        return (50.0 if lap % every == 0 else 1.0 for lap in itertools.count())

    row = compare("laps", lambda: interrupted(3).__next__, lambda: interrupted(2).__next__, rounds=20)
    assert row.ratio == 1.0


def test_both_sides_run_equally_often_and_each_begins() -> None:
    ran: list[str] = []

    def lap(side: str) -> float:
        ran.append(side)
        return 1.0

    compare("laps", lambda: lambda: lap("A"), lambda: lambda: lap("B"), rounds=7)
    assert ran.count("A") == ran.count("B")
    assert "".join(ran[-24:]) == "ABBABAAB" + "BAABABBA" + "ABBABAAB"


@pytest.mark.parametrize(("target", "verdict"), [(None, "-"), (1.2, "met"), (1.05, "unclear"), (1.0, "missed")])
def test_the_verdict_follows_the_interval(target: float | None, verdict: str) -> None:
    row = summary("laps", [(1.0, 1.0 + hundredth / 100) for hundredth in range(11)], target)
    assert (round(row.ratio, 2), row.low < 1.05 < row.high) == (1.05, True)
    assert row.verdict == verdict


def test_the_reference_column_is_there_when_asked_for() -> None:
    rows = [summary("laps", [(1.0, 1.01)], 1.03), summary("others", [(1.0, 1.02)])]
    head, _, first, second = render(rows, {"laps": 1.333}).splitlines()
    assert head.endswith("reference")
    assert (first.split()[-1], second.split()[-1]) == ("1.333", "-")


def test_a_missed_target_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(rounds: int) -> list[Comparison]:
        return [summary("a slow import", [(1.0, 2.0)] * rounds, target=1.03)]

    monkeypatch.setattr(imports, "run", slow)
    assert main(["imports", "--rounds", "2"]) == 1
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"), [(["stpe"], "unknown subject stpe"), (["step", "--rounds", "0"], "1 or more, not 0")]
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert complaint in capsys.readouterr().err
