"""Name runs for people: by the names that they were given, else by their project and the settings that differ."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .reading import RunRecords

_MADE_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""What the tracker names a run that was given no name: the time it started."""
_MOST_SETTINGS = 3
_LONGEST_VALUE = 16


def name_runs(runs: Sequence[RunRecords]) -> None:
    """Set the names of the runs that are shown together. Each has another name.

    A folder that somebody named is the name. A run whose folder is a time is named by its project, where the projects
    differ, and by the settings in which it differs from the other runs; runs that are still alike, by the start.
    """
    folders = short_names([run.file.parent for run in runs])
    made = [run for run in runs if _MADE_NAME.fullmatch(run.file.parent.name)]
    words = dict(zip(map(id, made), _words(made), strict=True))
    named = [words.get(id(run)) or folder for run, folder in zip(runs, folders, strict=True)]
    counts = Counter(named)
    for run, name in zip(runs, named, strict=True):
        run.name = f"{name}, {_start(run)}" if counts[name] > 1 else name
    counts = Counter(run.name for run in runs)
    for run, folder in zip(runs, folders, strict=True):
        if counts[run.name] > 1:
            run.name = folder


def _words(runs: Sequence[RunRecords]) -> Iterator[str]:
    settings = [dict(flat(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if _tells_apart(key, settings)]
    projects = {run.project for run in runs}
    for run, mine in zip(runs, settings, strict=True):
        told = [f"{key.rpartition('.')[2]}={mine[key]}" for key in keys if key in mine][:_MOST_SETTINGS]
        project = run.project if len(projects) > 1 or not told else None
        yield " ".join([*([project] if project else []), *told])


def _tells_apart(key: str, settings: Sequence[Mapping[str, str]]) -> bool:
    values = {each.get(key) for each in settings}
    return len(values) > 1 and all(value is None or len(value) <= _LONGEST_VALUE for value in values)


def _start(run: RunRecords) -> str:
    began = run.segments[0][0] if run.segments else 0.0
    return time.strftime("%m-%d %H:%M:%S", time.localtime(began))


def flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Return a nested configuration as lines of `outer.inner` and a value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", plain(value)


def plain(value: Any) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffix of each folder's path."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    names: list[str] = []
    endings: dict[int, Counter[tuple[str, ...]]] = {}
    for mine in parts:
        length = 1
        while length < len(mine):
            if length not in endings:
                endings[length] = Counter(other[-length:] for other in parts)
            if endings[length][mine[-length:]] == 1:
                break
            length += 1
        names.append("/".join(mine[-length:]))
    return names
