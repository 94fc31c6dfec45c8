"""`meshwright report`, as people type it."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np
import pexpect
import pytest

from tests.launching import COMMAND, Launched, environment, run_accelerate
from tests.timing import limit
from tests.tools.report.page.test_page import data_of, shown
from tests.tools.report.writing import START, start, values, write_loss, write_run


def report(directory: Path, *words: object, **variables: str) -> Launched:
    return run_accelerate("report", *words, directory=directory, **variables)


@pytest.fixture
def no_torch(tmp_path: Path) -> str:
    """Return a path on which torch cannot be imported."""
    folder = tmp_path / "no_torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise RuntimeError('torch was imported')")
    return str(folder)


def test_help_answers_without_torch_and_numpy(tmp_path: Path, no_torch: str) -> None:
    (Path(no_torch) / "numpy.py").write_text("raise RuntimeError('numpy was imported')")
    helped = report(tmp_path, "--help", PYTHONPATH=no_torch)
    assert helped.code == 0, helped.complaints
    for word in ("RUN_DIR", "--output FILE", "--open", "--live", "--interval SECONDS", "--metric NAME", "--points N"):
        assert word in helped.printed


def test_without_a_folder_it_reports_on_runs_and_needs_no_torch(tmp_path: Path, no_torch: str) -> None:
    write_loss(tmp_path / "runs" / "digits" / "first")
    write_loss(tmp_path / "runs" / "digits" / "second")
    written = report(tmp_path, PYTHONPATH=no_torch)
    assert written.code == 0, written.complaints
    assert re.fullmatch(r"runs/report\.html \(\d+ kB\): 2 runs, 40 values, \d+\.\d s\n", written.printed)
    data = data_of((tmp_path / "runs" / "report.html").read_text(encoding="utf-8"))
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert [path.name for path in (tmp_path / "runs").iterdir()].count("report.html") == 1


def test_a_run_and_its_file_can_be_named_and_the_page_lies_beside(tmp_path: Path) -> None:
    folder = write_loss(tmp_path / "a")
    assert report(tmp_path, "a").printed.startswith("a/report.html (")
    (folder / "report.html").unlink()
    assert report(tmp_path, "a/metrics.jsonl").printed.startswith("a/report.html (")
    assert (folder / "report.html").stat().st_mode & 0o044, "others may read it, as any file"


@pytest.mark.parametrize("flag", ["--output", "-o"])
def test_the_page_goes_where_it_is_wanted(tmp_path: Path, flag: str) -> None:
    write_loss(tmp_path / "a")
    (tmp_path / "pages").mkdir()
    assert report(tmp_path, "a", flag, "pages/mine.html").printed.startswith("pages/mine.html (")
    assert report(tmp_path, "a", flag, "pages").printed.startswith("pages/report.html (")
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["mine.html", "report.html"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]


def test_a_place_that_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    refused = report(tmp_path, "a", "--output", "missing/page.html")
    assert refused.code == 1
    assert refused.complaints == (
        "meshwright report: cannot write missing/page.html: No such file or directory. "
        "Name another place with --output FILE.\n"
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere"], r"there is no folder nowhere\. .*log_with=\"jsonl\""),
        ([], r"there is no folder runs\. .*log_with=\"jsonl\""),
        (["empty"], r"no metrics\.jsonl in empty or below\. .*log_with=\"jsonl\""),
        (["text"], r"there are no numbers to draw in 1 run.*accelerator\.log"),
        (["a", "--metric", "bleu"], r"no metric matches bleu\. The runs have: loss\."),
        (["a", "--live", "--output", "x"], r"--output is for the page, --live shows none\."),
        (["nowhere", "--live"], r"there is no folder nowhere\."),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line_with_a_remedy(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    write_loss(tmp_path / "a")
    write_run(tmp_path / "text", start(), values(1, note="only text"))
    (tmp_path / "empty").mkdir()
    refused = report(tmp_path, *words)
    assert (refused.code, refused.printed) == (1, "")
    assert re.fullmatch(rf"meshwright report: {complaint}.*\n", refused.complaints), refused.complaints


def test_a_number_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for words in (["--points", "3"], ["--interval", "0"], ["--points", "many"]):
        refused = report(tmp_path, *words)
        assert refused.code == 2
        assert f"argument {words[0]}" in refused.complaints


def test_open_shows_the_page_in_the_browser(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    browser = tmp_path / "browser.sh"
    browser.write_text('#!/bin/sh\nprintf "%s" "$1" > opened\n')
    browser.chmod(0o755)
    opened = report(tmp_path, "a", "--open", BROWSER=f"{browser} %s")
    assert opened.code == 0, opened.complaints
    assert (tmp_path / "opened").read_text() == (tmp_path / "a" / "report.html").as_uri()


def test_without_a_terminal_live_prints_one_frame(tmp_path: Path) -> None:
    write_loss(tmp_path / "a", ended=False)
    shown_once = report(tmp_path, "a", "--live", COLUMNS="90", LINES="30", PYTHONIOENCODING="utf-8")
    assert shown_once.code == 0, shown_once.complaints
    assert "\x1b" not in shown_once.printed
    assert "● a  cut off  step 19 · 1 steps/s" in shown_once.printed
    assert max(map(len, shown_once.printed.splitlines())) <= 90
    assert len(shown_once.printed.splitlines()) <= 30


def test_live_waits_for_runs_and_leaves_when_they_end(tmp_path: Path) -> None:
    words = [*("report", "--live"), *("--interval", "0.1")]
    live = pexpect.spawn(
        str(COMMAND), words, cwd=str(tmp_path), env=environment(tmp_path, TERM="xterm"), encoding="utf-8",
        dimensions=(40, 100), timeout=limit(20),
    )  # fmt: skip
    live.expect_exact("waiting for a metrics.jsonl in runs")
    write_loss(tmp_path / "runs" / "digits" / "late")
    live.expect_exact("all runs have ended")
    live.expect(pexpect.EOF)
    live.close()
    assert live.exitstatus == 0


def test_a_million_values_of_five_runs_become_a_page_of_ten_megabytes_in_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are the promise. Measured as a user meets them, so without the tracing of a coverage run."""
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    generator = np.random.default_rng(0)
    names = ("loss", "lr", "accuracy", "grad_norm")
    for number in range(5):
        noise = generator.random((50_000, 4)).round(6)
        noise[33_333, 0] = 77 + number
        lines = [
            f'{{"step":{i},"time":{START + i / 10},"values":'
            + "{" + ",".join(f'"{name}":{value}' for name, value in zip(names, row, strict=True)) + "}}\n"
            for i, row in enumerate(noise.tolist())
        ]  # fmt: skip
        write_run(tmp_path / "runs" / f"run{number}", start(), tail="".join(lines))
    began = time.monotonic()
    written = report(tmp_path)
    seconds = time.monotonic() - began
    assert "5 runs, 1,000,000 values" in written.printed, written.complaints
    page = tmp_path / "runs" / "report.html"
    data = data_of(page.read_text(encoding="utf-8"))
    assert [curve["max"] for curve in data["charts"][0]["curves"]] == [77.0, 78.0, 79.0, 80.0, 81.0]
    for number in range(5):
        step, _, value = shown(data, curve=number)
        assert step[value.argmax()] == 33_333
    assert page.stat().st_size <= 10e6
    assert seconds <= limit(10), f"{seconds:.1f} s"


def test_the_verb_alone_is_the_verb_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.commands.report import main

    monkeypatch.setattr(sys, "argv", ["accelerate-report", str(write_loss(tmp_path / "a"))])
    main()
    assert (tmp_path / "a" / "report.html").is_file()
