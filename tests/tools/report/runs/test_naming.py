"""The names of runs: those that they were given, else the project and the settings that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.tools.report.runs.finding import read_runs
from tests.tools.report.writing import START, start, values, write_run

FIRST, SECOND, THIRD = "2026-11-19_20-01-02", "2026-11-19_21-30-00", "2026-11-19_21-30-05"


def names_of(folder: Path, *runs: tuple[str, str, dict[str, Any]]) -> list[str]:
    for number, (name, project, config) in enumerate(runs):
        began = START + 60 * number
        write_run(folder / project / name, start(project, time=began), {"config": config}, values(1, began, loss=1))
    return [run.name for run in read_runs([folder])]


def test_one_run_without_a_name_has_that_of_its_project(tmp_path: Path) -> None:
    assert names_of(tmp_path, (FIRST, "digits", {"lr": 0.1})) == ["digits"]


def test_runs_of_one_project_are_named_by_the_settings_that_differ(tmp_path: Path) -> None:
    configs: list[dict[str, Any]] = [
        {"seed": 1, "optimizer": {"lr": lr, "name": "adamw"}, "notes": "long " * 9 + str(lr)} for lr in (0.1, 0.01)
    ]
    names = names_of(tmp_path, (FIRST, "digits", configs[0]), (SECOND, "digits", configs[1]))
    assert names == ["lr=0.1", "lr=0.01"]


def test_the_project_is_there_where_projects_differ(tmp_path: Path) -> None:
    names = names_of(tmp_path, (FIRST, "digits", {"lr": 1}), (SECOND, "words", {"lr": 2}))
    assert names == ["digits lr=1", "words lr=2"]


def test_runs_that_are_alike_are_told_apart_by_their_start(tmp_path: Path) -> None:
    names = names_of(tmp_path, *[(name, "digits", {"lr": 1}) for name in (FIRST, SECOND)], (THIRD, "digits", {"lr": 2}))
    assert names[2] == "lr=2"
    assert names[0] != names[1]
    assert all(name.startswith("lr=1, ") for name in names[:2])


@pytest.mark.parametrize("given", ["baseline", "2026-11-19 notes"])
def test_a_name_that_was_given_stays(given: str, tmp_path: Path) -> None:
    names = names_of(tmp_path, (FIRST, "digits", {"lr": 1}), (given, "digits", {"lr": 2}))
    assert sorted(names) == sorted(["digits", given])


def test_a_run_without_a_project_keeps_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / FIRST, values(1, loss=1))
    assert [run.name for run in read_runs([tmp_path])] == [FIRST]
