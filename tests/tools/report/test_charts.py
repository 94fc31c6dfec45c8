"""The charts, their order and the ones that nobody logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.tools.report.charts import (
    LOSS,
    MEMORY,
    OTHER,
    RATE,
    SCORE,
    SPEED,
    charts_of,
    kind_of,
    matches,
    throughput,
)
from meshwright.tools.report.runs.reading import Points, RunRecords
from tests.tools.report.writing import START, start, values, write_run


def read(folder: Path) -> RunRecords:
    run = RunRecords(folder / "metrics.jsonl")
    run.update()
    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train/loss", LOSS), ("eval_perplexity", LOSS), ("accuracy", SCORE), ("eval/F1", SCORE), ("lr", RATE),
        ("learning_rate", RATE), ("lr-AdamW", RATE), ("tokens_per_second", SPEED), ("memory/host", MEMORY),
        ("grad_norm", OTHER), ("glossary", OTHER),
    ],
)  # fmt: skip
def test_a_name_tells_its_kind(name: str, kind: int) -> None:
    assert kind_of(name) == kind


def test_groups_stay_together_with_losses_first(tmp_path: Path) -> None:
    logged = {"lr": 1, "other": 1, "train/grad_norm": 1, "eval/accuracy": 1, "eval/loss": 1, "train/loss": 1}
    system = {"time": START + 1, "step": 2, "system": {"memory/host": 2**31, "memory/device": 0}}
    run = read(write_run(tmp_path, start(), values(1, **logged), values(3, **logged), system))
    assert [(chart.group, chart.name) for chart in charts_of([run])] == [
        ("eval", "eval/loss"),
        ("eval", "eval/accuracy"),
        ("train", "train/loss"),
        ("train", "train/grad_norm"),
        ("", "lr"),
        ("", "other"),
        ("system", "throughput (steps/s)"),
        ("system", "memory/host (GiB)"),
    ], "a device without memory gets no chart"
    assert charts_of([run])[-1].curves[0][1].value.tolist() == [2.0]


def test_the_meter_comes_last(tmp_path: Path) -> None:
    logged = {"meter/samples_per_second": 1, "train/loss": 1, "other": 1}
    run = read(write_run(tmp_path, start(), values(1, **logged)))
    assert [chart.group for chart in charts_of([run])] == ["train", "", "meter"]


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("meter/seconds_left", 12.5, "duration"), ("train_runtime", 3.0, "duration"), ("eval/seconds", 1, "duration"),
        ("samples_per_second", 12.5, None), ("meter/steps_per_second", 3, None), ("loss", 1.0, None),
        ("meter/ends_at", START, "clock"), ("look_at", 3.0, None), ("timestamp", "NaN", None),
    ],
)  # fmt: skip
def test_a_name_and_its_values_tell_a_time(name: str, value: Any, unit: str | None, tmp_path: Path) -> None:
    [chart] = charts_of([read(write_run(tmp_path, start(), values(1, **{name: value})))])
    assert chart.unit == unit


def test_runs_share_a_chart_by_name(tmp_path: Path) -> None:
    first = read(write_run(tmp_path / "a", start(), values(1, loss=1, only_a=1)))
    second = read(write_run(tmp_path / "b", start(), values(1, loss=2)))
    curves = {chart.name: [run for run, _ in chart.curves] for chart in charts_of([first, second])}
    assert curves == {"loss": [0, 1], "only_a": [0]}


def test_a_metric_that_a_resume_superseded_whole_has_no_curve(tmp_path: Path) -> None:
    records = [values(1, loss=1), values(9, late=1), start(time=START + 50), values(5, loss=2)]
    run = read(write_run(tmp_path, start(), *records))
    assert [chart.name for chart in charts_of([run])] == ["loss"]


def test_throughput_is_steps_over_time_and_leaves_the_pause_of_a_resume_out(tmp_path: Path) -> None:
    before = [values(step, time=START + step / 4, loss=1) for step in range(9)]
    after = [values(step, time=START + 1000 + step / 2, loss=1) for step in range(5, 9)]
    run = read(write_run(tmp_path, start(), *before, start(time=START + 1000), *after))
    speed = throughput(run.progress.points())
    assert speed.value.tolist() == [4.0] * 4 + [2.0] * 3
    assert speed.step.tolist() == [1, 2, 3, 4, 6, 7, 8]


def test_throughput_of_many_steps_is_a_mean_over_intervals() -> None:
    steps = np.arange(100_000, dtype=float)
    speed = throughput(Points(steps, steps / 50, np.ones_like(steps)))
    assert 300 <= len(speed.value) <= 400
    assert np.allclose(speed.value, 50)


@pytest.mark.parametrize(
    ("wanted", "found"), [("LOSS", True), ("eval/*", True), ("train/*", False), ("*loss", True), ("acc", False)]
)
def test_a_metric_is_wanted_by_a_part_or_a_pattern(wanted: str, found: bool) -> None:
    assert matches("eval/loss", [wanted]) is found
