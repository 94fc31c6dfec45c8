"""The progress bar of a run: drawn by rich or tqdm in a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...config.packages import compare_versions

_SECONDS_BETWEEN_FRAMES = 0.5
_SECONDS_BETWEEN_LINES = 10.0
_MOST_LINES = 50
"""Plain lines in the time that a run has taken so far, at most: a long run writes less often."""


class RunBar:
    """Plain lines."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def pause(self) -> float:
        """Return the seconds until the next update."""
        return max(_SECONDS_BETWEEN_LINES, (time.monotonic() - self._started) / _MOST_LINES)

    def update(self, head: str, done: int, total: int | None, text: str) -> None:
        """Show how far the run is."""
        share = "" if not total else f"/{total} ({done / total:.0%})"
        print("  ".join(part for part in (head, f"{done}{share}", text) if part), file=sys.stderr, flush=True)

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which the script prints."""
        return nullcontext()

    def close(self) -> None:
        """Leave the last state on the screen."""


class _RichBar(RunBar):
    """A bar of rich, which puts what the script prints above itself."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__()
        self._bar = Progress(
            TextColumn("{task.fields[head]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread: it would take time from the loop
            redirect_stdout=sys.stdout.isatty(),  # not if it goes to a file
        )
        self._task = self._bar.add_task("", total=None, head="", text="")
        self._bar.start()

    def pause(self) -> float:
        return _SECONDS_BETWEEN_FRAMES

    def update(self, head: str, done: int, total: int | None, text: str) -> None:
        self._bar.update(self._task, completed=done, total=total, head=head, text=text, refresh=True)

    def close(self) -> None:
        self._bar.stop()


class _TqdmBar(RunBar):
    """A bar of tqdm, which is taken away while the script prints."""

    def __init__(self) -> None:
        from tqdm import tqdm

        super().__init__()
        shown = "{desc}{percentage:3.0f}%|{bar:25}| {n_fmt}/{total_fmt}{postfix}"
        self._bar: Any = tqdm(total=1, bar_format=shown, leave=True, dynamic_ncols=True)

    def pause(self) -> float:
        return _SECONDS_BETWEEN_FRAMES

    def update(self, head: str, done: int, total: int | None, text: str) -> None:
        self._bar.total, self._bar.n = total or done or 1, done
        self._bar.set_description(head, refresh=False)
        self._bar.set_postfix_str(text)

    def aside(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._bar.external_write_mode(file=sys.stdout)
        return context

    def close(self) -> None:
        self._bar.close()


def open_bar() -> RunBar:
    """Return the best bar that can be drawn here."""
    if sys.stderr.isatty():
        for kind in (_RichBar, _TqdmBar):
            if kind is _RichBar and not _has_rich():
                continue
            try:
                return kind()
            except ImportError:
                continue
    return RunBar()


def _has_rich() -> bool:
    try:
        return not compare_versions("rich", "<", "14.1")  # before, two bars at once are an error
    except ImportError:
        return False
