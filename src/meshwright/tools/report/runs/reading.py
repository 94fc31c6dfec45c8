"""Read a run from its file, incrementally."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....untrusted import open_regular
from .lines import LATEST, MOST_BYTES, LineError, number_within, parsed

QUIET_SECONDS = 60.0
"""How long a running run may write nothing; longer if it has been quiet for longer before."""

_FURTHEST_STEP = 1e15
_LARGEST = 1e300
"""Larger values are drawn as infinite: differences of smaller ones are numbers."""
_MOST_SERIES = 100_000
_LONGEST_NAME = 1000
_MOST_LENGTHS = 1_000_000
"""Of all series at all checkpoints; the oldest checkpoints go first."""
_SPELLED_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Floats = npt.NDArray[np.float64]


class Points(NamedTuple):
    """A curve: steps, times and values."""

    step: Floats
    time: Floats
    value: Floats

    def at(self, indices: Any) -> Points:
        """Return some of the points."""
        return Points(self.step[indices], self.time[indices], self.value[indices])


class Text(NamedTuple):
    """A logged text."""

    step: float
    time: float
    name: str
    text: str


class _Snapshot(NamedTuple):
    """The length of a run at a checkpoint: of each series by its id, of the texts, and the last step."""

    lengths: dict[int, int]
    texts: int
    last_step: float | None


class Series:
    """A growing curve."""

    def __init__(self) -> None:
        self._columns = (array("d"), array("d"), array("d"))

    def __len__(self) -> int:
        return len(self._columns[0])

    def append(self, step: float, when: float, value: float) -> None:
        """Add one point."""
        steps, times, values = self._columns
        steps.append(step)
        times.append(when)
        values.append(value)

    def points(self) -> Points:
        """Return a copy of the points: an array with a view cannot grow."""
        points = Points(*(np.array(column) for column in self._columns))
        points.value[points.value > _LARGEST] = np.inf
        points.value[points.value < -_LARGEST] = -np.inf
        return points

    def truncate(self, length: int) -> None:
        """Keep the first points only."""
        self._columns = tuple(column[:length] for column in self._columns)  # type: ignore[assignment]

    def drop_superseded(self, first_step: float, before: int) -> None:
        """Drop those of the first `before` points whose step is not below `first_step`."""
        points = self.points()
        stays = points.step < first_step
        stays[before:] = True
        if not stays.all():
            self._columns = tuple(array("d", column.tobytes()) for column in points.at(stays))  # type: ignore[assignment]


class RunRecords:
    """The records of one file so far."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = file.parent.name
        self._reset()

    def _reset(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.segments: list[tuple[float, float]] = []
        """Time of the start and of the last record of each start, the first or a resume."""
        self.config: dict[str, Any] = {}
        self.ended: float | None = None
        self.scalars: dict[str, Series] = {}
        self.system: dict[str, Series] = {}
        self.progress = Series()
        """Step and time of every record that advanced the step; the value is the segment."""
        self.texts: list[Text] = []
        self.skipped = 0
        """Number of lines that are no records: a crash may truncate one."""
        self.torn = False
        """Whether the file ends within a line."""
        self.last_step: float | None = None
        self.last_time: float | None = None
        self._lost: list[dict[str, int]] = [{}]
        self._longest_silence = 0.0
        self._offset = 0
        self._is_in_long_line = False
        self._before_resume: tuple[dict[int, int], int] | None = None
        self._checkpoints: dict[str, _Snapshot] = {}
        self._num_lengths = 0

    @property
    def project(self) -> str | None:
        """The project's name, if the run has one."""
        name = self.starts[0].get("project") if self.starts else None
        return name if isinstance(name, str) and name else None

    @property
    def seconds(self) -> float:
        """How long it ran, without the pauses between an interruption and a resume."""
        return sum(end - begin for begin, end in self.segments)

    @property
    def lost(self) -> dict[str, int]:
        """How many records each tracker of the run did not store, over all starts."""
        names = dict.fromkeys(name for counts in self._lost for name in counts)
        return {name: sum(counts.get(name, 0) for counts in self._lost) for name in names}

    def state(self, now: float | None = None) -> str:
        """Return "finished", "running" or "cut off"."""
        if self.ended is not None:
            return "finished"
        silence = (time.time() if now is None else now) - (self.last_time or 0.0)
        return "running" if silence < max(QUIET_SECONDS, 3 * self._longest_silence) else "cut off"

    def update(self) -> bool:
        """Read what was appended since the last call, and return whether there was anything."""
        with open_regular(self.file, "the log of a run") as lines:
            size = os.fstat(lines.fileno()).st_size
            if size < self._offset:  # it was replaced
                self._reset()
            begin = self._offset
            lines.seek(begin)
            self.torn = False
            while line := lines.readline(MOST_BYTES):
                is_complete = line.endswith(b"\n")
                if self._is_in_long_line or len(line) == MOST_BYTES:
                    self._is_in_long_line = not is_complete
                    self.skipped += is_complete
                elif not is_complete:
                    self.torn = True  # perhaps still being written: read again when complete
                    break
                elif not line.isspace():
                    self._read(line)
                self._offset += len(line)
        return self._offset > begin

    def _read(self, line: bytes) -> None:
        try:
            self._apply(parsed(line))
        except LineError:
            # A resume appended to a truncated line must not be lost.
            resumed = line.rfind(b'{"start"')
            for piece in (line[:resumed], line[resumed:]) if resumed > 0 else ():
                try:
                    self._apply(parsed(piece))
                except LineError:
                    self.skipped += 1
            self.skipped += resumed <= 0

    def _apply(self, record: dict[str, Any]) -> None:
        if isinstance(values := record.get("values"), dict):
            self._apply_values(record, values)
        elif isinstance(values := record.get("system"), dict):
            step, when = number_within(record, "step", _FURTHEST_STEP), self._advance_time(record)
            for name, value in values.items():
                if (number := _number(value)) is not None:
                    self._series(self.system, name).append(self._step_or_last(step), when, number)
        elif isinstance(start := record.get("start"), dict):
            self._apply_start(start)
        elif isinstance(config := record.get("config"), dict):
            self.config.update(config)
        elif isinstance(lost := record.get("lost"), dict):
            if any(type(count) is not int or not 0 <= count < LATEST for count in lost.values()):
                raise LineError
            self._lost[-1] = lost
        elif isinstance(checkpoint := record.get("checkpoint"), dict):
            if not isinstance(mark := checkpoint.get("id"), str):
                raise LineError
            self._advance_time(checkpoint)
            self._checkpoints[mark] = snapshot = self._snapshot()
            self._num_lengths += len(snapshot.lengths)
            while self._num_lengths > _MOST_LENGTHS and len(self._checkpoints) > 1:
                self._forget(next(iter(self._checkpoints)))
        elif isinstance(end := record.get("end"), dict):
            self.ended = self._advance_time(end)

    def _apply_start(self, start: dict[str, Any]) -> None:
        when = number_within(start, "time", LATEST)
        when = self.last_time or 0.0 if when is None else when
        self._before_resume = None
        resumed = start.get("resumed")
        if isinstance(resumed, str) and resumed in self._checkpoints:
            self._rewind(resumed)
        elif self.starts:  # its first logged step shows which steps are repeated
            self._before_resume = (self._snapshot().lengths, len(self.texts))
        if start.get("taken_over") and self.segments:  # another process writes on; the run did not stop
            self._advance_time(start)
            self._lost.append({})
            return
        self.starts.append(start)
        self._lost.append({})
        self.segments.append((when, when))
        self.ended = None
        self.last_time = when

    def _apply_values(self, record: dict[str, Any], values: dict[str, Any]) -> None:
        step, when = number_within(record, "step", _FURTHEST_STEP), self._advance_time(record)
        if self._before_resume is not None and step is not None:
            self._supersede(step)
        step = self._step_or_last(step, advance=True)
        if self.last_step is None or step > self.last_step:
            self.progress.append(step, when, len(self.segments))
        self.last_step = step
        for name, value in values.items():
            number = _number(value)
            if number is not None:
                series = self.scalars.get(name)
                if series is None:
                    series = self._series(self.scalars, name)
                series.append(step, when, number)
            elif isinstance(value, str):
                self.texts.append(Text(step, when, name, value))

    def _series(self, of: dict[str, Series], name: str) -> Series:
        """Return a series; make it if there is none, in bounds: a damaged file may hold any number of names."""
        if name in of:
            return of[name]
        if len(of) >= _MOST_SERIES or len(name) > _LONGEST_NAME:
            raise LineError
        series = of[name] = Series()
        return series

    def _forget(self, checkpoint: str) -> None:
        self._num_lengths -= len(self._checkpoints.pop(checkpoint).lengths)

    def _snapshot(self) -> _Snapshot:
        lengths = {id(series): len(series) for series in self._all_series()}
        return _Snapshot(lengths, len(self.texts), self.last_step)

    def _rewind(self, checkpoint: str) -> None:
        """Drop the records after a checkpoint: the resumed run repeats these steps."""
        snapshot = self._checkpoints[checkpoint]
        for series in self._all_series():
            series.truncate(snapshot.lengths.get(id(series), 0))
        del self.texts[snapshot.texts :]
        self.last_step = snapshot.last_step
        names = list(self._checkpoints)
        for later in names[names.index(checkpoint) + 1 :]:
            self._forget(later)

    def _supersede(self, first_step: float) -> None:
        """Drop the records from the first step that the resumed run repeats."""
        assert self._before_resume is not None
        lengths, texts = self._before_resume
        for series in self._all_series():
            series.drop_superseded(first_step, lengths.get(id(series), 0))
        self.texts = [text for i, text in enumerate(self.texts) if i >= texts or text.step < first_step]
        self.last_step = None
        self._before_resume = None

    def _all_series(self) -> Iterable[Series]:
        yield from self.scalars.values()
        yield from self.system.values()
        yield self.progress

    def _step_or_last(self, step: float | None, advance: bool = False) -> float:
        if step is not None:
            return step
        return 0.0 if self.last_step is None else self.last_step + advance

    def _advance_time(self, record: dict[str, Any]) -> float:
        when = number_within(record, "time", LATEST)
        if when is None:
            when = self.last_time or 0.0
        if not self.segments:
            self.segments.append((when, when))
        begin, end = self.segments[-1]
        if when - end > self._longest_silence:
            self._longest_silence = when - end
        self.segments[-1] = (begin, max(when, end))
        self.last_time = when
        return when


def describe_skipped(lines: int) -> str:
    """Return a short message on lines that could not be read; none if there were none."""
    return f"{lines:,} damaged line{'s' * (lines != 1)} skipped" if lines else ""


def describe_lost(run: RunRecords) -> list[str]:
    """Return a short message for each tracker that has lost records."""
    return [f"{name} lost {count:,} record{'s' * (count != 1)}" for name, count in run.lost.items()]


def _number(value: Any) -> float | None:
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _SPELLED_FLOATS.get(value) if isinstance(value, str) else None
