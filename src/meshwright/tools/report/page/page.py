"""Build one self-contained HTML file from the runs and the assets: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import ReportError
from ..charts import METER, OTHER, RATE, Chart, charts_of
from ..runs.moments import FILE_NAME as RANKS_FILE, RunEnd, newest_windows
from ..runs.naming import flat, plain
from ..runs.reading import Floats, Points, RunRecords, describe_lost
from ..runs.replicas import Changes, read_changes
from ..runs.sampling import bucket_means, downsampled, not_finite

POINTS = 2000
"""Points that a curve keeps by default: about four per pixel of a chart."""
_ALL_POINTS = 500_000
"""Points that a page keeps by default, about 7 MB: many curves get fewer each."""
_MIN_POINTS = 200
_MARKS = 100
_MAIN_METRICS = 6
_TEXTS_PER_RUN = 200
_CHANGES_PER_RUN = 500
_SCRIPTS = ("numbers.js", "curve.js", "chart.js", "tables.js", "page.js")
_EXACT_IN_FLOAT32 = 2**24


def build_page(
    runs: Sequence[RunRecords], *, version: str, points: int | None = None, wanted: Sequence[str] = ()
) -> str:
    """Return the page of some runs."""
    charts = charts_of(runs, wanted)
    if not any(chart.curves for chart in charts):
        _refuse(runs, wanted)
    curves = sum(len(chart.curves) for chart in charts)
    limit = points or min(POINTS, max(_MIN_POINTS, _ALL_POINTS // curves))
    now = time.time()
    arrays = _Arrays()
    titles = list(dict.fromkeys(run.project for run in runs if run.project)) or [runs[0].name]
    data = {
        "title": ", ".join(titles),
        "made": now,
        "version": version,
        "limit": limit,
        "runs": [_run(run, now) for run in runs],
        "charts": [_chart(chart, runs, limit, arrays) for chart in charts],
        "main": [i for i, chart in enumerate(charts) if chart.kind != OTHER and chart.group != METER][:_MAIN_METRICS]
        or [0],
        "texts": list(_texts(runs)),
        "textsLeftOut": sum(max(0, len(run.texts) - _TEXTS_PER_RUN) for run in runs),
        "arrays": arrays.texts,
    }
    return _fill_template(data)


def _refuse(runs: Sequence[RunRecords], wanted: Sequence[str]) -> None:
    names = sorted({name for run in runs for name in run.scalars})
    if wanted and names:
        raise ReportError(f"no metric matches {', '.join(wanted)}. The runs have: {', '.join(names[:20])}.")
    raise ReportError(
        f"there are no numbers to draw in {len(runs)} run(s), such as {runs[0].file}. "
        'Log some: accelerator.log({"loss": loss.item()}, step=step).'
    )


def _fill_template(data: Mapping[str, Any]) -> str:
    """Fill the template. Names from runs are only ever text: escaped here, and set as textContent by the script."""
    style = _asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_asset, _SCRIPTS)) + "\n})();\n"
    parts = {
        "TITLE": html.escape(str(data["title"])),
        "STYLE": style,
        "SCRIPT": script,
        # Content-Security-Policy: only this script and this style may run, whatever the data contains.
        "STYLE_HASH": _hash(style),
        "SCRIPT_HASH": _hash(script),
        "DATA": _script_safe(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)),
    }
    # One pass, so that nothing in the data is taken for a placeholder.
    page = re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))
    return page.encode("utf-8", "replace").decode("utf-8")  # JSON can hold lone surrogates, which UTF-8 cannot encode


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_safe(text: str) -> str:
    """Escape characters that could end a script element."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _run(run: RunRecords, now: float) -> dict[str, Any]:
    facts = run.starts[-1] if run.starts else {}
    windows, changes = newest_windows(run.file.with_name(RANKS_FILE)), read_changes(run.file)
    return {
        "name": run.name,
        "path": str(run.file.parent),
        "state": run.state(now),
        "segments": run.segments or [(0.0, 0.0)],
        "seconds": run.seconds,
        "lastStep": run.last_step,
        "lastTime": run.last_time,
        "skipped": run.skipped + run.torn + windows.skipped + (0 if changes is None else changes.skipped),
        "lost": describe_lost(run),
        "facts": {key: plain(facts[key]) for key in ("processes", "torch", "meshwright") if key in facts},
        "config": dict(flat(run.config)),
        "ranks": _ranks(run, windows, has_members=changes is not None),
        "replicas": None if changes is None else _replicas(run, changes),
    }


def _replicas(run: RunRecords, found: Changes) -> dict[str, Any]:
    """Return who left and who joined under `meshwright launch --survive`, and the total."""
    progress = run.progress.points()
    shown = found.changes[-_CHANGES_PER_RUN:]
    logged = np.searchsorted(progress.time, [change.time for change in shown], side="right")
    steps = [float(progress.step[place - 1]) if place else 0.0 for place in logged]
    return {
        "total": found.total,
        "leftOut": len(found.changes) - len(shown),
        "changes": [
            {
                "time": change.time,
                "step": step,
                "kind": change.kind,
                "text": change.text,
                "seconds": change.seconds,
                "count": f"{change.replicas} of {change.of}",
            }
            for change, step in zip(shown, steps, strict=True)
        ],
    }


def _ranks(run: RunRecords, windows: RunEnd, *, has_members: bool) -> dict[str, Any] | None:
    """Return milliseconds per rank and phase in the last window, and the last straggler."""
    window, slow = windows.newest, windows.slow
    if window is None:
        return None
    # After a change of members the steps are counted from 0.
    step = window.step if run.last_step is None or not has_members else int(run.last_step)
    return {
        "step": step,
        "of": window.num_ranks,
        "phases": [[window.phases[index], index] for index in window.used],
        "rows": [[rank, *(window.ranks[rank][index] for index in window.used)] for rank in sorted(window.ranks)],
        "slow": [window.straggler.rank, window.straggler.phase] if window.straggler else None,
        "message": None if slow is None or slow.straggler is None else [slow.step, slow.straggler.text],
    }


def _texts(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    for number, run in enumerate(runs):
        for text in run.texts[-_TEXTS_PER_RUN:]:
            yield {"run": number, "step": _finite(text.step), "name": text.name, "text": text.text}


def _chart(chart: Chart, runs: Sequence[RunRecords], limit: int, arrays: _Arrays) -> dict[str, Any]:
    return {
        "name": chart.name,
        "group": chart.group,
        "better": chart.better,
        "unit": chart.unit,
        "exact": chart.kind == RATE,  # a schedule is not smoothed
        "curves": [_curve(number, points, runs[number], limit, arrays) for number, points in chart.curves],
    }


def _curve(number: int, points: Points, run: RunRecords, limit: int, arrays: _Arrays) -> dict[str, Any]:
    begin = run.segments[0][0]
    points = points._replace(time=points.time - begin)
    if np.any(np.diff(points.step) < 0):
        points = points.at(np.argsort(points.step, kind="stable"))
    finite = points.value[np.isfinite(points.value)]
    bad, marks = not_finite(points, _MARKS)
    curve = {
        "run": number,
        "total": len(points.value),
        "shown": arrays.add(points.at(downsampled(points.value, limit))),
        "last": _finite(points.value[-1]),
        "min": _finite(finite.min()) if len(finite) else None,
        "max": _finite(finite.max()) if len(finite) else None,
    }
    if len(points.value) > limit:
        curve["means"] = arrays.add(bucket_means(points, limit), exact=False)
    if bad:
        curve["bad"] = bad
        curve["marks"] = arrays.add(marks)
    return curve


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


class _Arrays:
    """Arrays as base64; arrays that several curves share, such as steps, are stored once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[str, int] = {}

    def add(self, points: Points, exact: bool = True) -> list[int]:
        """Return the indices of step, time and value; `exact` for steps that were logged, not computed."""
        return [self._index(points.step, exact), self._index(points.time), self._index(points.value)]

    def _index(self, numbers: Floats, exact: bool = False) -> int:
        text = packed(numbers, exact)
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]


def packed(numbers: Floats, exact: bool = False) -> str:
    """Return one letter for the width of the floats, and their little-endian bytes as base64."""
    small = numbers.astype("<f4") if _fits_float32(numbers, exact) else None
    chosen: npt.NDArray[Any] = numbers.astype("<f8") if small is None else small
    return ("d" if small is None else "f") + base64.b64encode(chosen.tobytes()).decode()


def _fits_float32(numbers: Floats, exact: bool) -> bool:
    """Return whether float32 loses nothing that a chart could show."""
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return True
    with np.errstate(over="ignore", under="ignore"):
        error = np.abs(finite.astype(np.float32).astype(np.float64) - finite)
    if exact:
        return not error.any() and bool(np.abs(finite).max() < _EXACT_IN_FLOAT32)
    fine = (error <= 1e-6 * np.abs(finite)).all()  # no underflow and no overflow
    spread = finite.max() - finite.min()
    return bool(fine and (spread == 0 or error.max() <= spread / 5000))
