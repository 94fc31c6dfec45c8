"""The words for what a run's meter logged last."""

from __future__ import annotations

import json
import time
from pathlib import Path

from meshwright.tools.report.runs.reading import RunRecords
from meshwright.tools.report.runs.throughput import newest_throughput
from meshwright.tools.report.terminal.ranks import WatchFrame


def write(folder: Path, *values: dict[str, float]) -> RunRecords:
    now = time.time()
    lines: list[dict[str, object]] = [{"start": {"time": now, "project": "p", "run": "r", "processes": 2}}]
    lines += [{"step": step, "time": now, "values": each} for step, each in enumerate(values)]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunRecords(file)
    run.update()
    return run


def test_the_newest_numbers_are_said(tmp_path: Path) -> None:
    first = {"meter/samples_per_second": 1.0}
    second = {
        "meter/samples_per_second": 1234.0,
        "meter/tokens_per_second": 2.5e6,
        "meter/tflops": 312.0,
        "meter/utilization": 0.412,
        "meter/memory_peak_gib": 31.25,
        "meter/ends_at": time.time() + 3725.5,
    }
    run = write(tmp_path, first, second)
    words = newest_throughput(run)
    assert words[:-1] == ["1.23k samples/s", "2.50M tokens/s", "312TFLOP/s (41.2% of peak)", "peak 31.25 GiB"]
    assert words[-1].startswith("1:02:0")
    assert "1.23k samples/s · 2.50M tokens/s" in WatchFrame(run, 160, 24).text(coloured=False)


def test_a_run_without_a_meter_says_nothing(tmp_path: Path) -> None:
    assert newest_throughput(write(tmp_path, {"loss": 1.0})) == []
