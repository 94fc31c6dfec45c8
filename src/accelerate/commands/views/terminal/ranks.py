"""Ranks x phases as a picture in the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from .. import ReportError
from ..runs.finding import find_files, read_runs
from ..runs.moments import FILE_NAME, Moment, newest_moments
from ..runs.reading import Run, clean, say_lost
from .live import follow, has_screen, show_once
from .text import BOLD, DIM, GREEN, RED, Line, Span, cut, render, run_colour, say_seconds

_NARROWEST_BAR = 24
_COLUMN = 10
_LINES_OF_FINDING = 2
_LETTERS = {"data": "d", "forward": "f", "backward": "b", "step": "s", "saving": "v", "waiting": "w", "other": "o"}
"""For bars without colours."""


class Ranks:
    """All that is seen at one moment."""

    def __init__(self, run: Run, width: int, height: int, page: int = 0) -> None:
        self.width, self.height = max(width, 20), max(height, 7 + _LINES_OF_FINDING)
        self._run = run
        self._moment, self._told = newest_moments(run.file.with_name(FILE_NAME))
        ranks = sorted(self._moment.ranks) if self._moment is not None else []
        room = self.height - 6 - _LINES_OF_FINDING
        self.pages = max(1, -(-len(ranks) // room))
        self._page = min(page, self.pages - 1)
        self._shown = ranks[self._page * room : (self._page + 1) * room]

    def text(self, coloured: bool, farewell: bool = False) -> str:
        """Return the picture's lines."""
        lines = [self._head(), []]
        if self._moment is None:
            lines.append([Span("waiting for the first steps …", DIM)])
        else:
            lines += [*self._table(self._moment, coloured), [], *self._finding(self._moment)]
        lines.append(self._foot(farewell))
        return "\n".join(render(line, self.width, coloured) for line in lines)

    def _head(self) -> Line:
        state, now = self._run.state(), time.time()
        line = [
            Span(clean(self._run.name), BOLD),
            Span(f"  {state}", {"finished": GREEN, "cut off": RED}.get(state, "")),
        ]
        lost = "".join(f" · {clean(words)}" for words in say_lost(self._run))
        if self._moment is None:
            return [*line, Span(lost, RED)]
        moment = self._moment
        left_out = f", {len(moment.ranks)} of them shown" if len(moment.ranks) < moment.num_ranks else ""
        facts = [f"step {moment.step}", f"{moment.num_ranks} ranks{left_out}"]
        facts.append(f"{say_seconds(now - moment.time)} ago")
        return [*line, Span("  " + " · ".join(facts), DIM), Span(lost, RED)]

    def _table(self, moment: Moment, coloured: bool) -> list[Line]:
        used = moment.used
        columns = used if self.width >= 8 + _NARROWEST_BAR + _COLUMN * (len(used) + 1) else []
        wide = self.width - 8 - _COLUMN * (len(columns) + bool(columns))
        slowest = moment.straggler or {}
        head = [Span("  rank  ", DIM)]
        if coloured and columns:
            head.append(Span(" " * wide))
        else:
            head += _legend(moment, used, wide, coloured)
        if columns:
            head.append(Span("step ms".rjust(_COLUMN), DIM))
        head += [Span(moment.phases[place].rjust(_COLUMN), run_colour(place)) for place in columns]
        rows: list[Line] = [head]
        longest = max(map(sum, moment.ranks.values())) or 1.0
        for rank in self._shown:
            times, slow = moment.ranks[rank], rank == slowest.get("rank")
            row = [Span(f"{'→' if slow else ' '}{rank:>5}  ", f"{BOLD};{RED}" if slow else "")]
            row += _bar(moment, times, wide / longest, wide, coloured)
            if columns:
                row.append(Span(f"{sum(times):.1f}".rjust(_COLUMN)))
            for place in columns:
                marked = slow and moment.phases[place] == slowest.get("phase")
                row.append(Span(f"{times[place]:.1f}".rjust(_COLUMN), f"{BOLD};{RED}" if marked else ""))
            rows.append(row)
        return rows

    def _finding(self, moment: Moment) -> list[Line]:
        text, colour = "No rank is slow.", DIM
        if self._told is not None and self._told.straggler is not None:
            text = clean(str(self._told.straggler.get("text", "")))
            if self._told is moment:
                colour = RED
            else:
                text = f"No rank is slow now. {say_seconds(time.time() - self._told.time)} ago: {text}"
        lines = textwrap.wrap(text, self.width, max_lines=_LINES_OF_FINDING, placeholder=" …")
        return [[Span(line, colour)] for line in lines]

    def _foot(self, farewell: bool) -> Line:
        words = [f"ranks {self._page + 1}/{self.pages}" + ("" if farewell else " (← →)")] if self.pages > 1 else []
        if not farewell:
            words.append("q or Ctrl-C to leave")
        return [Span(" · ".join(words), DIM)]


def _legend(moment: Moment, used: Sequence[int], width: int, coloured: bool) -> list[Span]:
    spans, left = [], width
    for place in used:
        name = moment.phases[place]
        word = cut(f"{'█' if coloured else _letter(name)} {name}  ", left)
        left -= len(word)
        spans.append(Span(word, run_colour(place)))
    return [*spans, Span(" " * left)]


def _letter(phase: str) -> str:
    return _LETTERS.get(phase, phase[:1])


def _bar(moment: Moment, times: Sequence[float], scale: float, width: int, coloured: bool) -> list[Span]:
    """Return a stacked bar; its parts end where their sums do, so that roundings do not add up."""
    spans, total, drawn = [], 0.0, 0
    for place, milliseconds in enumerate(times):
        total += milliseconds
        length = round(total * scale) - drawn
        drawn += length
        spans.append(Span(("█" if coloured else _letter(moment.phases[place])) * length, run_colour(place)))
    return [*spans, Span(" " * (width - drawn))]


def watched_run(places: Sequence[Path]) -> Run:
    """Return the run whose ranks were written down last, or say why there is none."""
    files = [file for file in find_files(places) if file.with_name(FILE_NAME).exists()]
    if not files:
        read_runs(places)  # says what is missing if there is no run at all
        raise ReportError(
            f"no {FILE_NAME} in {', '.join(map(str, places))} or below. It is written beside metrics.jsonl once a run "
            'with log_with="jsonl" has made about 20 steps on at least 2 processes, unless ACCELERATE_HANG_SECONDS=0.'
        )
    return Run(max(files, key=lambda file: file.with_name(FILE_NAME).stat().st_mtime))


def show_ranks(places: Sequence[Path], *, interval: float) -> None:
    """Show the ranks of the newest run until it has ended or the user leaves; without a terminal, show them once."""
    run = watched_run(places)
    run.update()
    if not has_screen(sys.stdout):
        show_once(sys.stdout, Ranks(run, *shutil.get_terminal_size((100, 40))))
        return

    def draw(width: int, height: int, page: int) -> Ranks:
        run.update()
        return Ranks(run, width, height, page)

    follow(Ranks(run, 80, 24), draw, lambda: run.ended is not None, interval)
