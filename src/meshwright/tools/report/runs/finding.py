"""Find runs: every `metrics.jsonl` in or below some folders, each with a short name."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ....errors import InvalidDataError
from .. import ReportError
from .naming import name_runs
from .reading import RunRecords

FILE_NAME = "metrics.jsonl"


class RunFinder:
    """All runs in some folders. `update` finds runs that appear later."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._by_file: dict[Path, RunRecords] = {}
        self._next_search = 0.0

    def __iter__(self) -> Iterator[RunRecords]:
        return iter(self._by_file.values())

    def __len__(self) -> int:
        return len(self._by_file)

    def update(self) -> bool:
        """Find new runs, read new records, and return whether there were any."""
        began = time.monotonic()
        if began >= self._next_search:
            self._search()
            # A slow search, in many folders or over a network, is done less often.
            self._next_search = time.monotonic() + 10 * (time.monotonic() - began)
        has_new = sum(read_appended(run) for run in self) > 0
        if has_new:
            name_runs(list(self))
        return has_new

    def _search(self) -> None:
        found = find_files(self.paths)
        self._by_file = {file: self._by_file.get(file) or RunRecords(file) for file in found}


def read_appended(run: RunRecords) -> bool:
    """Read what was appended to a run, and return whether there was anything; raise ReportError if it fails."""
    try:
        return run.update()
    except FileNotFoundError:  # deleted since it was found
        return False
    except OSError as error:
        raise ReportError(f"{run.file} cannot be read: {error.strerror or error}.") from None
    except InvalidDataError as error:
        raise ReportError(f"{error}.") from None


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of all runs in some paths: the files themselves, or folders that contain them at any depth."""
    found: dict[str, Path] = {}
    for path in paths:
        if path.is_file():
            found.setdefault(os.path.realpath(path), path)
            continue
        for folder, below, files in os.walk(path):
            below.sort()
            file = Path(folder, FILE_NAME)
            if FILE_NAME in files and file.is_file():  # and not a pipe
                found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def read_runs(paths: Sequence[Path]) -> RunFinder:
    """Read all runs in some folders; raise ReportError if there are none."""
    for path in paths:
        if not path.exists():
            raise ReportError(
                f"there is no folder {path}. Name the folder of a run, or one above it: with "
                'log_with="jsonl", runs are written to <logging_dir or "runs">/<project>/<run>.'
            )
    runs = RunFinder(paths)
    runs.update()
    if not len(runs):
        raise ReportError(
            f"no {FILE_NAME} in {', '.join(map(str, paths))} or below. Runs write it with "
            'Accelerator(log_with="jsonl"), init_trackers("my_project") and log({"loss": loss}, step=step).'
        )
    return runs
