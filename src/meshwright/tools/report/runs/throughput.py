"""Say what the meter of a run logged last."""

from __future__ import annotations

import math
import time

from ...meter.reading import duration, short
from .lines import LATEST
from .reading import RunRecords

_LARGEST = 1e20


def newest_throughput(run: RunRecords) -> list[str]:
    """Return the newest numbers of a run's meter in words; none if it logged none."""

    def newest(name: str) -> float | None:
        series = run.scalars.get(f"meter/{name}")
        value = math.nan if series is None or not len(series) else float(series.points().value[-1])
        return value if abs(value) <= _LARGEST else None

    words = []
    for name, unit in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if (rate := newest(name)) is not None:
            words.append(f"{short(rate)} {unit}")
    if (tera := newest("tflops")) is not None:
        share = newest("utilization")
        words.append(f"{short(tera * 1e12)}FLOP/s" + ("" if share is None else f" ({share:.1%} of peak)"))
    if (memory := newest("memory_peak_gib")) is not None:
        words.append(f"peak {memory:.2f} GiB")
    end = newest("ends_at")
    if end is not None and abs(end) <= LATEST and run.state() == "running":
        words.append(
            f"{duration(max(0.0, end - time.time()))} left, ends {time.strftime('%H:%M', time.localtime(end))}"
        )
    return words
