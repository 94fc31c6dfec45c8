"""Finding runs, and their short names."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.tools.report import ReportError
from meshwright.tools.report.runs.finding import RunFinder, find_files, read_runs
from tests.tools.report.writing import append, values, write_loss


def names(runs: RunFinder) -> list[str]:
    return [run.name for run in runs]


def test_a_run_is_found_by_its_folder_its_file_and_any_folder_above(tmp_path: Path) -> None:
    folder = write_loss(tmp_path / "runs" / "digits" / "a")
    for place in (folder, folder / "metrics.jsonl", tmp_path / "runs" / "digits", tmp_path):
        assert find_files([place]) == [folder / "metrics.jsonl"]


def test_a_run_named_twice_is_one_run(tmp_path: Path) -> None:
    folder = write_loss(tmp_path / "a")
    (tmp_path / "latest").symlink_to(folder)
    assert len(find_files([tmp_path, folder, folder / "metrics.jsonl", tmp_path / "latest"])) == 1


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    for name in ("digits/a", "digits/b", "words/b"):
        write_loss(tmp_path / name)
    assert names(read_runs([tmp_path])) == ["a", "digits/b", "words/b"]


def test_a_run_that_appears_later_is_found_and_names_follow(tmp_path: Path) -> None:
    write_loss(tmp_path / "x" / "run")
    runs = RunFinder([tmp_path])
    runs.update()
    assert names(runs) == ["run"]
    first = next(iter(runs))
    write_loss(tmp_path / "y" / "run")
    append(tmp_path / "x" / "run", values(20, loss=0))
    runs._next_search = 0.0  # a slow search is not repeated at once
    assert runs.update()
    assert names(runs) == ["x/run", "y/run"]
    assert next(iter(runs)) is first, "what was read is kept"
    assert len(first.scalars["loss"]) == 21


def test_a_missing_folder_is_named_with_where_runs_are(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"there is no folder .*nowhere.*log_with=\"jsonl\""):
        read_runs([tmp_path / "nowhere"])


def test_a_folder_without_runs_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=rf"no metrics\.jsonl in {tmp_path}.*log_with=\"jsonl\""):
        read_runs([tmp_path])
