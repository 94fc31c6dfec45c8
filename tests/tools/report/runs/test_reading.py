"""Reading the file of a run: complete, resumed, truncated or growing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.tools.report.runs.reading import RunRecords, describe_lost
from tests.tools.report.writing import START, append, end, start, values, write_run


def read(folder: Path) -> RunRecords:
    run = RunRecords(folder / "metrics.jsonl")
    run.update()
    return run


def steps_of(run: RunRecords, name: str) -> list[float]:
    return run.scalars[name].points().step.tolist()


def values_of(run: RunRecords, name: str) -> list[float]:
    return run.scalars[name].points().value.tolist()


def test_numbers_texts_and_spelled_floats_are_told_apart(tmp_path: Path) -> None:
    record = values(1, loss=0.5, note="hello", count=3, a="NaN", b="Infinity", c="-Infinity", flag=True, none=None)
    run = read(write_run(tmp_path, start(), record))
    assert set(run.scalars) == {"loss", "count", "a", "b", "c", "flag"}
    assert math.isnan(values_of(run, "a")[0])
    assert (values_of(run, "b"), values_of(run, "c"), values_of(run, "flag")) == ([math.inf], [-math.inf], [1.0])
    assert [(text.step, text.name, text.text) for text in run.texts] == [(1.0, "note", "hello")]


def test_configuration_system_values_and_facts_are_kept(tmp_path: Path) -> None:
    system = {"time": START + 2, "step": 1, "system": {"memory/host": 2**30, "memory/device": 0}}
    config = {"config": {"lr": 0.1, "optimizer": {"name": "adamw"}}}
    run = read(write_run(tmp_path, start(processes=2), config, values(1, loss=1), system, end(START + 5)))
    assert run.project == "digits"
    assert run.starts[0]["processes"] == 2
    assert run.config == {"lr": 0.1, "optimizer": {"name": "adamw"}}
    assert run.system["memory/host"].points().value.tolist() == [2.0**30]
    assert (run.seconds, run.last_step) == (5.0, 1.0)


@pytest.mark.parametrize(
    ("records", "now", "state"),
    [
        ([start(), values(1, loss=1), end()], START + 9999, "finished"),
        ([start(), values(1, loss=1)], START + 9999, "cut off"),
        ([start(), values(1, loss=1)], START + 20, "running"),
        ([start(), values(600, loss=1)], START + 600 + 1700, "running"),
        ([start(), values(600, loss=1)], START + 600 + 1900, "cut off"),
        ([start(), values(1, loss=1), end(), start(time=START + 5000)], START + 5001, "running"),
    ],
)
def test_the_state_follows_from_the_end_and_the_last_line(
    tmp_path: Path, records: list[dict[str, object]], now: float, state: str
) -> None:
    assert read(write_run(tmp_path, *records)).state(now) == state


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, start(), values(1, loss=1), tail='{"step": 2, "val'))
    assert (run.torn, run.skipped, steps_of(run, "loss")) == (True, 0, [1.0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ues": {"loss": 2}}\n')
    assert run.update()
    assert (run.torn, run.skipped, steps_of(run, "loss")) == (False, 0, [1.0, 2.0])


def test_lines_that_are_no_json_are_counted_and_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, start(), values(1, loss=1), tail='{"step": 2, "va\n\n[1, 2]\n"text"\n')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "values": {"\xff": 1}}\n' + b"[" * 100_000 + b"\n")
    append(folder, values(4, loss=4))
    run = read(folder)
    assert run.skipped == 5
    assert steps_of(run, "loss") == [1.0, 4.0]


def test_a_resume_written_behind_a_torn_line_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path, start(), values(5, loss=1), tail='{"step": 6, "values": {"lo')
    append(folder, start(time=START + 100), values(5, time=START + 101, loss=7))
    run = read(folder)
    assert (len(run.starts), run.skipped) == (2, 1)
    assert values_of(run, "loss") == [7.0]


def test_unknown_records_are_ignored_and_steps_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    odd = [{"artifact": {}}, {"values": 3}, {"start": []}, {"step": "x", "time": None, "values": {"loss": 2}}, {}]
    run = read(write_run(tmp_path, start(), values(1, loss=1), *odd, {"step": "NaN", "values": {"loss": 3}}))
    assert (run.skipped, len(run.starts)) == (2, 1)
    assert steps_of(run, "loss") == [1.0]
    append(tmp_path, {"values": {"loss": 2}})
    run.update()
    assert steps_of(run, "loss") == [1.0, 2.0], "a record without a step follows the one before it"


def test_a_resumed_run_supersedes_the_steps_it_does_again(tmp_path: Path) -> None:
    before = [values(step, loss=step, note=f"old {step}") for step in range(10)] + [values(9, eval=9)]
    after = [values(step, time=START + 500 + step, loss=-step) for step in range(6, 9)]
    memory = [{"time": START + t, "step": t, "system": {"memory/host": t}} for t in (3, 8)]
    run = read(write_run(tmp_path, start(), *before, *memory, start(time=START + 500), *after))
    assert steps_of(run, "loss") == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert values_of(run, "loss") == [0, 1, 2, 3, 4, 5, -6, -7, -8]
    assert steps_of(run, "eval") == [], "step 9 was not reached again"
    assert [text.step for text in run.texts] == [0, 1, 2, 3, 4, 5]
    assert run.system["memory/host"].points().step.tolist() == [3]
    assert run.seconds == 9 + 8, "the pause between the two is not counted"


def test_a_run_resumed_from_a_marked_checkpoint_goes_back_to_that_line(tmp_path: Path) -> None:
    def mark(name: str) -> dict[str, Any]:
        return {"checkpoint": {"time": START + 9, "id": name}}

    first = (start(), values(1, loss=1), mark("a"), values(2, loss=2), mark("b"), values(2, eval=2, note="lost"),
             values(3, loss=3), mark("c"), values(4, loss=4))  # fmt: skip
    second = (start(time=START + 20, resumed="b"), values(2, eval=20), values(3, loss=30), mark("d"), end())
    run = read(write_run(tmp_path, *first, *second))
    assert (steps_of(run, "loss"), values_of(run, "loss")) == ([1, 2, 3], [1, 2, 30])
    assert values_of(run, "eval") == [20], "logged after the checkpoint, at the step of the checkpoint"
    assert run.texts == []
    assert run.progress.points().step.tolist() == [1, 2, 3]
    append(tmp_path, start(time=START + 30, resumed="a"), values(2, loss=200), end())
    run.update()
    assert (steps_of(run, "loss"), values_of(run, "loss")) == ([1, 2], [1, 200])
    append(tmp_path, start(time=START + 40, resumed="c"), values(3, loss=300))  # of a past that was left
    run.update()
    assert values_of(run, "loss") == [1, 200, 300]


def test_what_was_logged_before_the_first_step_of_a_resume_stays(tmp_path: Path) -> None:
    early = {"time": START + 501, "step": 9, "system": {"memory/host": 5}}
    run = read(write_run(tmp_path, start(), values(9, loss=1), start(time=START + 500), early, values(4, loss=2)))
    assert run.system["memory/host"].points().value.tolist() == [5]
    assert steps_of(run, "loss") == [4]


def test_what_trackers_lost_is_added_up_over_the_starts(tmp_path: Path) -> None:
    def lost(**counts: int) -> dict[str, Any]:
        return {"time": START, "lost": counts}

    first = (start(), lost(wandb=2), values(1, loss=1), lost(wandb=1200, jsonl=1))
    run = read(write_run(tmp_path, *first, start(time=START + 5), lost(wandb=34), end()))
    assert run.lost == {"wandb": 1234, "jsonl": 1}
    assert describe_lost(run) == ["wandb lost 1,234 records", "jsonl lost 1 record"]


def test_an_update_reads_only_what_was_appended(tmp_path: Path) -> None:
    folder = write_run(tmp_path, start(), *(values(step, loss=step) for step in range(1000)))
    run = read(folder)
    assert not run.update(), "nothing new"
    # What was read once is not looked at again: were it read, it would now be broken.
    size = (folder / "metrics.jsonl").stat().st_size
    (folder / "metrics.jsonl").write_bytes(b"#" * size)
    append(folder, values(1000, loss=1000))
    assert run.update()
    assert (run.skipped, len(run.scalars["loss"]), run.last_step) == (0, 1001, 1000.0)


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, start(), *(values(step, loss=step) for step in range(10))))
    write_run(tmp_path, start("other"), values(1, accuracy=1))
    run.update()
    assert (run.project, set(run.scalars)) == ("other", {"accuracy"})


def test_numbers_that_no_float_can_hold_are_infinite(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, start(), values(1, huge=10**400, tiny=-(10**400))))
    assert np.isposinf(values_of(run, "huge")).all()
    assert np.isneginf(values_of(run, "tiny")).all()


def test_a_run_that_another_process_writes_on_was_not_resumed(tmp_path: Path) -> None:
    taken_over = start(time=START + 4, taken_over=True, processes=3)
    records = [
        start(processes=4),
        values(1, loss=1),
        values(2, loss=2),
        taken_over,
        values(2, loss=3),
        values(3, loss=4),
    ]
    run = RunRecords(write_run(tmp_path, *records) / "metrics.jsonl")
    run.update()
    assert len(run.segments) == 1
    assert run.starts[-1]["processes"] == 4
    assert values_of(run, "loss") == [1, 3, 4], "a step that both have logged counts once"
