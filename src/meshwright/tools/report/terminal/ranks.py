"""Draw the step time of every rank, by phase, in the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from ....untrusted import printable
from .. import ReportError
from ..runs.finding import find_files, read_appended, read_runs
from ..runs.moments import FILE_NAME, StepWindow, newest_windows
from ..runs.naming import name_runs
from ..runs.reading import RunRecords, describe_lost, describe_skipped
from ..runs.replicas import FILE_NAME as REPLICAS_FILE, Change, read_changes
from ..runs.throughput import newest_throughput
from .live import follow, has_screen, show_once
from .text import BOLD, DIM, GREEN, RED, Line, StyledText, cut, format_seconds, render, run_colour

_MIN_BAR_WIDTH = 24
_COLUMN = 10
_MAX_FINDING_LINES = 2
_LONGEST_FINDING = 1000
_MAX_CHANGES = 8
_OTHER = "other: the script's own code between optimizer.step() and the next batch"
_LETTERS = {"data": "d", "forward": "f", "backward": "b", "step": "s", "saving": "v", "waiting": "w", "other": "o"}
"""Letters of the phases, for bars without colours."""


class WatchFrame:
    """One frame of `meshwright watch`: the newest window of one run."""

    def __init__(self, run: RunRecords, width: int, height: int, page: int = 0) -> None:
        self.width, self.height = max(width, 20), max(height, 7 + _MAX_FINDING_LINES)
        self._run = run
        self._window, self._slow_window, skipped = newest_windows(run.file.with_name(FILE_NAME))
        self._changes = read_changes(run.file)
        self._skipped = run.skipped + skipped + (0 if self._changes is None else self._changes.skipped)
        ranks = sorted(self._window.ranks) if self._window is not None else []
        self._throughput = newest_throughput(run)
        names = set() if self._window is None else {self._window.phases[phase] for phase in self._window.used}
        self._notes: list[Line] = [[StyledText(_OTHER, DIM)]] if "other" in names else []
        free_lines = self.height - 6 - _MAX_FINDING_LINES - bool(self._throughput) - len(self._notes)
        changes = [] if self._changes is None else self._changes.changes
        self._newest = changes[-min(_MAX_CHANGES, max(1, free_lines // 3)) :]
        free_lines = max(1, free_lines - len(self._newest) - 3 * bool(changes))
        self.pages = max(1, -(-len(ranks) // free_lines))
        self._page = min(page, self.pages - 1)
        self._shown = ranks[self._page * free_lines : (self._page + 1) * free_lines]

    def text(self, coloured: bool, final: bool = False) -> str:
        """Return the picture's lines."""
        throughput = [[StyledText(" · ".join(self._throughput))]] if self._throughput else []
        lines = [self._head(), *throughput, []]
        if self._window is not None:
            lines += [*self._table(self._window, coloured), [], *self._finding(self._window), *self._notes]
        elif self._changes is None:
            lines.append([StyledText("waiting for the first steps …", DIM)])
        if self._changes is not None:
            whole = self._changes.changes[-1].replicas == self._changes.changes[-1].of
            head = [StyledText(f"{self._changes.present} train", BOLD if whole else f"{BOLD};{RED}")]
            lines += [[]] if self._window is not None else []
            lines += [[*head, StyledText(f" · {self._changes.total}", DIM)], _CHANGES_HEAD, *map(_change, self._newest)]
        lines.append(self._foot(final))
        return "\n".join(render(line, self.width, coloured) for line in lines)

    def _head(self) -> Line:
        state, now = self._run.state(), time.time()
        line = [
            StyledText(printable(self._run.name), BOLD),
            StyledText(f"  {state}", {"finished": GREEN, "cut off": RED}.get(state, "")),
        ]
        problems = [*describe_lost(self._run), describe_skipped(self._skipped)]
        lost = "".join(f" · {printable(words)}" for words in problems if words)
        if self._window is None:
            return [*line, StyledText(lost, RED)]
        window = self._window
        left_out = f", {len(window.ranks)} of them shown" if len(window.ranks) < window.num_ranks else ""
        step = window.step if self._changes is None or self._run.last_step is None else int(self._run.last_step)
        facts = [f"step {step}", f"{window.num_ranks} ranks{left_out}"]
        facts.append(f"{format_seconds(now - window.time)} ago")
        return [*line, StyledText("  " + " · ".join(facts), DIM), StyledText(lost, RED)]

    def _table(self, window: StepWindow, coloured: bool) -> list[Line]:
        used = window.used
        columns = used if self.width >= 8 + _MIN_BAR_WIDTH + _COLUMN * (len(used) + 1) else []
        wide = self.width - 8 - _COLUMN * (len(columns) + bool(columns))
        slowest = window.straggler
        head = [StyledText("  rank  ", DIM)]
        if coloured and columns:
            head.append(StyledText(" " * wide))
        else:
            head += _legend(window, used, wide, coloured)
        if columns:
            head.append(StyledText("step ms".rjust(_COLUMN), DIM))
        head += [StyledText(window.phases[phase].rjust(_COLUMN), run_colour(phase)) for phase in columns]
        rows: list[Line] = [head]
        longest = max(map(sum, window.ranks.values())) or 1.0
        for rank in self._shown:
            times, slow = window.ranks[rank], slowest is not None and rank == slowest.rank
            row = [StyledText(f"{'→' if slow else ' '}{rank:>5}  ", f"{BOLD};{RED}" if slow else "")]
            row += _bar(window, times, wide / longest, wide, coloured)
            if columns:
                row.append(StyledText(f"{sum(times):.1f}".rjust(_COLUMN)))
            for phase in columns:
                marked = slow and slowest is not None and window.phases[phase] == slowest.phase
                row.append(StyledText(f"{times[phase]:.1f}".rjust(_COLUMN), f"{BOLD};{RED}" if marked else ""))
            rows.append(row)
        return rows

    def _finding(self, window: StepWindow) -> list[Line]:
        text, colour = "No rank is slow.", DIM
        if self._slow_window is not None and self._slow_window.straggler is not None:
            text = printable(self._slow_window.straggler.text, _LONGEST_FINDING)
            if self._slow_window is window:
                colour = RED
            else:
                text = f"No rank is slow now. {format_seconds(time.time() - self._slow_window.time)} ago: {text}"
        lines = textwrap.wrap(text, self.width, max_lines=_MAX_FINDING_LINES, placeholder=" …")
        return [[StyledText(line, colour)] for line in lines]

    def _foot(self, final: bool) -> Line:
        words = [f"ranks {self._page + 1}/{self.pages}" + ("" if final else " (← →)")] if self.pages > 1 else []
        if not final:
            words.append("q or Ctrl-C to leave")
        return [StyledText(" · ".join(words), DIM)]


_CHANGES_HEAD = [StyledText(f"{'when':>15}{'cost':>10}{'replicas':>10}", DIM)]


def _change(change: Change) -> Line:
    when = f"{format_seconds(time.time() - change.time)} ago"
    cost = "" if change.seconds is None else f"{change.seconds:.2f} s"
    colour = {"joined": GREEN, "left": RED}.get(change.kind, "")
    return [StyledText(f"{when:>15}{cost:>10}{change.replicas:>10}  ", DIM), StyledText(change.text, colour)]


def _legend(window: StepWindow, used: Sequence[int], width: int, coloured: bool) -> list[StyledText]:
    spans, left = [], width
    for phase in used:
        name = window.phases[phase]
        word = cut(f"{'█' if coloured else _letter(name)} {name}  ", left)
        left -= len(word)
        spans.append(StyledText(word, run_colour(phase)))
    return [*spans, StyledText(" " * left)]


def _letter(phase: str) -> str:
    return _LETTERS.get(phase, phase[:1])


def _bar(window: StepWindow, times: Sequence[float], scale: float, width: int, coloured: bool) -> list[StyledText]:
    """Return a stacked bar; its parts end where their sums do, so that rounding errors do not add up."""
    spans, total, drawn = [], 0.0, 0
    for phase, milliseconds in enumerate(times):
        total += milliseconds
        length = round(total * scale) - drawn
        drawn += length
        spans.append(StyledText(("█" if coloured else _letter(window.phases[phase])) * length, run_colour(phase)))
    return [*spans, StyledText(" " * (width - drawn))]


def watched_run(paths: Sequence[Path]) -> RunRecords:
    """Return the run with the newest file of ranks or replicas; raise ReportError if there is none."""
    beside = {file: [file.with_name(name) for name in (FILE_NAME, REPLICAS_FILE)] for file in find_files(paths)}
    written = {
        file: [written_at for other in others if (written_at := _written_at(other))] for file, others in beside.items()
    }
    files = [file for file, times in written.items() if times]
    if not files:
        read_runs(paths)  # raises if there is no run at all
        raise ReportError(
            f"no {FILE_NAME} in {', '.join(map(str, paths))} or below. It is written beside metrics.jsonl once a run "
            'with log_with="jsonl" has made about 20 steps on at least 2 processes, unless MESHWRIGHT_HANG_SECONDS=0.'
        )
    return RunRecords(max(files, key=lambda file: max(written[file])))


def _written_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def show_ranks(paths: Sequence[Path], *, interval: float) -> None:
    """Show the ranks of the newest run until it has ended or the user leaves; without a terminal, show them once."""
    run = watched_run(paths)
    read_appended(run)
    name_runs([run])
    if not has_screen(sys.stdout):
        show_once(sys.stdout, WatchFrame(run, *shutil.get_terminal_size((100, 40))))
        return

    def draw(width: int, height: int, page: int) -> WatchFrame:
        read_appended(run)
        return WatchFrame(run, width, height, page)

    follow(WatchFrame(run, 80, 24), draw, lambda: run.ended is not None, interval)
