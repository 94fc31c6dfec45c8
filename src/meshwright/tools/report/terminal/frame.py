"""Draw one frame of the live view: a line per run, and a grid of charts that fits the terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import numpy as np

from ....program import program_name
from ....untrusted import printable
from ..charts import Chart, charts_of
from ..runs.finding import FILE_NAME, RunFinder
from ..runs.naming import flat
from ..runs.reading import RunRecords, describe_lost, describe_skipped
from ..runs.replicas import read_changes
from ..runs.throughput import newest_throughput
from .text import (
    BOLD,
    DIM,
    GREEN,
    RED,
    Box,
    Line,
    StyledText,
    column_means,
    draw,
    format_number,
    format_seconds,
    render,
    run_colour,
)

_MAX_RUNS = 8
_CHART_WIDTH = 52
"""The minimum width of a chart, unless the terminal is narrower."""
_CHART_HEIGHT = 10
_LABEL = 9
_RECENT = 50
"""Number of records over which the speed is measured."""
_DIGITS = re.compile("[0-9]{1,15}")
_TOTAL_STEPS = ("max_steps", "max_train_steps", "total_steps", "num_steps", "num_training_steps", "steps")


class Frame:
    """One frame of the live view of some runs."""

    def __init__(self, runs: RunFinder, wanted: Sequence[str], width: int, height: int, page: int = 0) -> None:
        self.width, self.height = max(width, 20), max(height, 5)
        self._now = time.time()
        self._paths = runs.paths
        recent = sorted(runs, key=lambda run: run.last_time or 0.0)[-_MAX_RUNS:]
        self._runs = [run for run in runs if run in recent]
        self._older = len(runs) - len(self._runs)
        self._charts = charts_of(self._runs, wanted)
        self._wanted = wanted
        across = max(1, min(self.width // _CHART_WIDTH, len(self._charts)))
        free_lines = self.height - len(self._head()) - 1
        down = max(1, min(free_lines // _CHART_HEIGHT, -(-len(self._charts) // across)))
        self._grid = (across, down, free_lines // down)
        self.pages = max(1, -(-len(self._charts) // (across * down)))
        self._page = min(page, self.pages - 1)

    def text(self, coloured: bool, final: bool = False) -> str:
        """Return the frame's lines."""
        across, down, tall = self._grid
        begin = self._page * across * down
        shown = self._charts[begin : begin + across * down]
        lines = [render(line, self.width, coloured) for line in self._head()]
        wide = (self.width - 2 * (across - 1)) // across
        for first in range(0, len(shown), across):
            blocks = [self._block(chart, wide, tall) for chart in shown[first : first + across]]
            lines += [
                "  ".join(render(line, wide, coloured, pad=True) for line in row).rstrip()
                for row in zip(*blocks, strict=True)
            ]
        if not self._charts:
            lines.append(self._nothing())
        lines = lines[: self.height - 1]
        return "\n".join([*lines, render(self._foot(final), self.width, coloured)])

    def _nothing(self) -> str:
        if not self._runs:
            return f"waiting for a {FILE_NAME} in {printable(', '.join(map(str, self._paths)))} or below …"
        if self._wanted:
            return f"no metric matches {printable(', '.join(self._wanted))} yet …"
        return "no numbers were logged yet …"

    def _head(self) -> list[Line]:
        projects = ", ".join(dict.fromkeys(run.project for run in self._runs if run.project))
        count = f"{len(self._runs)} run{'s' * (len(self._runs) != 1)}"
        older = f" · {self._older} older not shown" if self._older else ""
        title = [
            StyledText(printable(projects) or f"{program_name()} report", BOLD),
            StyledText(f"  {count}{older}", DIM),
        ]
        return [title, *(self._about(number, run) for number, run in enumerate(self._runs)), []]

    def _about(self, number: int, run: RunRecords) -> Line:
        state = run.state(self._now)
        line = [
            StyledText("● ", run_colour(number)),
            StyledText(printable(run.name)),
            StyledText(f"  {state}", {"finished": GREEN, "cut off": RED}.get(state, "")),
        ]
        facts = [f"step {format_number(run.last_step)}"] if run.last_step is not None else []
        speed = recent_speed(run)
        if speed is not None:
            facts.append(f"{format_number(speed)} steps/s")
        facts += [*newest_throughput(run), format_seconds(run.seconds)]
        if state != "finished" and run.last_time is not None:
            facts.append(f"last line {format_seconds(self._now - run.last_time)} ago")
            total = total_steps(run)
            if state == "running" and speed and total and run.last_step is not None and total > run.last_step:
                facts.append(f"about {format_seconds((total - run.last_step) / speed)} to step {format_number(total)}")
        if (changes := read_changes(run.file)) is not None:
            facts += [changes.present, changes.total]
        problems = [*describe_lost(run), describe_skipped(run.skipped)]
        lost = "".join(f" · {printable(words)}" for words in problems if words)
        return [*line, StyledText("  " + " · ".join(facts), DIM), StyledText(lost, RED)]

    def _foot(self, final: bool) -> Line:
        states = {run.state(self._now) for run in self._runs}
        words = ["all runs have ended"] if states == {"finished"} else []
        if len(self._runs) > 1 and self._charts:
            words.append("means per column")
        if self.pages > 1:
            words.append(f"charts {self._page + 1}/{self.pages}" + ("" if final else " (← →)"))
        if not final:
            words.append("q or Ctrl-C to leave")
        return [StyledText(" · ".join(words), DIM)]

    def _block(self, chart: Chart, width: int, height: int) -> list[Line]:
        """Return one chart: its name and last values, the plot, and the ends of its axes."""
        tall, wide = max(1, height - 3), width - _LABEL - 1
        bad = sum(int(np.count_nonzero(~np.isfinite(points.value))) for _, points in chart.curves)
        title = [StyledText(printable(chart.name), BOLD)]
        title += [
            StyledText(f"  {format_number(float(points.value[-1]))}", run_colour(number))
            for number, points in chart.curves
        ]
        if bad:
            title.append(StyledText(f"  {bad} not finite", RED))
        steps = np.concatenate([points.step for _, points in chart.curves])
        left, right = float(steps.min()), float(steps.max())
        curves = chart.curves
        if len(curves) > 1:  # noisy curves would cover each other
            curves = [(number, column_means(points, wide, left, right)) for number, points in curves]
        values = np.concatenate([points.value for _, points in curves])
        values = values[np.isfinite(values)]
        if not len(values):
            return [title, *([[]] * (height - 1))]
        low, high = float(values.min()), float(values.max())
        if low == high:
            low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
        labels = {0: format_number(high), tall - 1: format_number(low)}
        if tall >= 5:
            labels[tall // 2] = format_number(high - (high - low) * (tall // 2) / (tall - 1))
        rows: list[Line] = [
            [StyledText(labels.get(i, "").rjust(_LABEL), DIM), StyledText("┤" if i in labels else "│", DIM), *line]
            for i, line in enumerate(draw(curves, wide, tall, Box(left, right, low, high)))
        ]
        first, last = format_number(left), format_number(right)
        ends = first + " " * max(1, wide - len(first + last)) + last
        return [title, *rows, [StyledText(" " * _LABEL + "└" + ends, DIM)], []]


def recent_speed(run: RunRecords) -> float | None:
    """Return steps per second over the last records since the last start."""
    progress = run.progress.points()
    progress = progress.at(progress.value == len(run.segments)).at(slice(-_RECENT, None))
    if len(progress.step) < 2 or progress.time[-1] <= progress.time[0]:
        return None
    return float((progress.step[-1] - progress.step[0]) / (progress.time[-1] - progress.time[0]))


def total_steps(run: RunRecords) -> float | None:
    """Return the total number of steps, if the run's configuration has it under a usual name."""
    values = {key.rpartition(".")[2]: value for key, value in flat(run.config)}
    return next((float(values[word]) for word in _TOTAL_STEPS if _DIGITS.fullmatch(values.get(word, ""))), None)
