"""Arrange the metrics of runs as charts, for the page and the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from .runs.reading import Floats, Points, RunRecords

LOSS, SCORE, RATE, SPEED, MEMORY, OTHER = range(6)
"""Kinds of charts, in the order in which they are shown."""

_WORDS = (
    (LOSS, {"loss", "losses", "perplexity", "ppl", "nll", "error", "err", "wer", "cer", "mse", "rmse", "mae", "bpb"}),
    (SCORE, {"accuracy", "acc", "f1", "auc", "auroc", "bleu", "rouge", "precision", "recall", "score", "iou", "map",
             "mcc", "reward", "r2", "top1", "top5", "em", "exact"}),
    (RATE, {"lr", "lrs", "learning"}),
    (SPEED, {"throughput", "speed", "tflops", "mfu", "utilization", "sec", "second"}),
    (MEMORY, {"memory", "mem", "vram"}),
)  # fmt: skip
METER = "meter"
"""The group of what `Accelerator(meter=True)` logs. It is shown last, and folded on the page."""
DURATION, MOMENT = "duration", "clock"
"""Units of times: seconds, and seconds since 1970."""
_DURATIONS = {"seconds", "secs", "duration", "runtime", "elapsed", "eta"}
_MOMENTS = {"at", "timestamp"}
_EARLIEST, _LATEST = 9e8, 9e9
GIB = 2.0**30
_SPEED_INTERVALS = 400


@dataclass
class Chart:
    """One metric of all runs."""

    name: str
    group: str
    kind: int
    curves: list[tuple[int, Points]] = field(default_factory=list)
    """The number of a run, and its points."""

    @property
    def unit(self) -> str | None:
        """The unit of its values, where the name tells it: a time, or None for a number."""
        words = re.split(r"[^a-z0-9]+", self.name.lower())
        if _MOMENTS & set(words[-1:]) and all(_are_moments(points.value) for _, points in self.curves):
            return MOMENT
        return DURATION if "per" not in words and _DURATIONS & set(words) else None

    @property
    def better(self) -> int:
        """-1 if lower is better, 1 if higher is better, 0 if unknown."""
        return {LOSS: -1, SCORE: 1}.get(self.kind, 0)


def _are_moments(values: Floats) -> bool:
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > _EARLIEST and finite.max() < _LATEST)


def kind_of(name: str) -> int:
    """Guess from a metric's name what it is."""
    words = set(re.split(r"[^a-z0-9]+|(?<=[a-z])(?=[0-9]{2})", name.lower()))
    return next((kind for kind, known in _WORDS if words & known), OTHER)


def charts_of(runs: Sequence[RunRecords], wanted: Sequence[str] = ()) -> list[Chart]:
    """Return the charts of some runs; charts of one group are adjacent."""
    charts: dict[tuple[bool, str], Chart] = {}
    for number, run in enumerate(runs):
        for name, series in run.scalars.items():
            if not len(series):
                continue  # all of it was superseded
            prefix, slash, _ = name.partition("/")
            chart = charts.setdefault((False, name), Chart(name, prefix if slash else "", kind_of(name)))
            chart.curves.append((number, series.points()))
        speed = throughput(run.progress.points())
        if len(speed.value):
            chart = charts.setdefault((True, ""), Chart("throughput (steps/s)", "system", SPEED))
            chart.curves.append((number, speed))
        for name, series in run.system.items():
            points = series.points()
            if not points.value.any():
                continue  # no such device: all values are zero
            if kind_of(name) == MEMORY:
                points, title = points._replace(value=points.value / GIB), f"{name} (GiB)"
            else:
                title = name
            chart = charts.setdefault((True, name), Chart(title, "system", kind_of(name)))
            chart.curves.append((number, points))
    return _in_order(chart for chart in charts.values() if not wanted or matches(chart.name, wanted))


def matches(name: str, wanted: Iterable[str]) -> bool:
    """Return whether a name contains one of some words, or matches one with `*` or `?`."""
    lowered = name.lower()
    return any(
        fnmatchcase(lowered, word.lower()) if set(word) & set("*?[") else word.lower() in lowered for word in wanted
    )


def _in_order(charts: Iterable[Chart]) -> list[Chart]:
    """Sort by kind, but keep a group together, at the position of its first chart; the meter comes last."""
    ordered = sorted(charts, key=lambda chart: chart.kind)
    positions: dict[str, int] = {}
    for position, chart in enumerate(ordered):
        positions.setdefault(chart.group, position)
    return sorted(ordered, key=lambda chart: (chart.group == METER, positions[chart.group]))


def throughput(progress: Points) -> Points:
    """Return steps per second, as the mean over intervals that are long enough not to be noise."""
    stride = max(1, -(-len(progress.step) // _SPEED_INTERVALS))
    ends = np.arange(stride, len(progress.step), stride)
    begins = ends - stride
    steps = progress.step[ends] - progress.step[begins]
    seconds = progress.time[ends] - progress.time[begins]
    # Across a resume there is a pause, or time that went into steps which were lost.
    good = (seconds > 0) & (steps > 0) & (progress.value[ends] == progress.value[begins])
    return Points(progress.step[ends][good], progress.time[ends][good], steps[good] / seconds[good])
