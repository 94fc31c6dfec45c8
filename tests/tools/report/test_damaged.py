"""Records of any content: every view shows what is valid, counts what is not, and never fails in another way."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands.watch import watch_command, watch_command_parser
from meshwright.tools.report import ReportError
from meshwright.tools.report.page.page import build_page
from meshwright.tools.report.runs import reading
from meshwright.tools.report.runs.finding import RunFinder, find_files, read_runs
from meshwright.tools.report.runs.naming import short_names
from meshwright.tools.report.runs.reading import RunRecords
from meshwright.tools.report.terminal.frame import Frame
from meshwright.tools.report.terminal.ranks import WatchFrame, watched_run
from tests.tools.report.writing import LEFT_AND_JOINED, START, end, start, values, write_loss

ODD: list[Any] = [
    None, True, 0, -1, 1.5, float("nan"), float("inf"), -1e308, 1e308, 1e-320, 10**400, -(10**30), 2**63, "", "x",
    "NaN", "²", "9" * 400, "\ud800", "</script>", "a" * 2000, [], {}, [1], {"a": 1}, "é\x1b[2J", START + 0.8,
    ["x"] * 200,
]  # fmt: skip
WINDOW = {
    "time": START, "step": 5, "of": 2, "phases": ["data", "forward"], "ranks": {"0": [1e4, 2e4], "1": [3e4, 4]},
    "straggler": {"rank": 1, "phase": "data", "text": "rank 1 is slow"},
}  # fmt: skip
RECORDS = [
    start(resumed="a"),
    start(taken_over=True),
    {"config": {"lr": 0.1, "steps": "100", "nested": {"a": 1}}},
    values(3, loss=1.0, **{"meter/ends_at": 1.8e9, "meter/tflops": 3.0, "meter/samples_per_second": 4.0}),
    values(4, loss="a text"),
    {"system": {"memory/host": 2**30}, "time": START, "step": 3},
    {"lost": {"wandb": 3}, "time": START},
    {"checkpoint": {"id": "a", "time": START}},
    end(),
]
ATTACKS = {
    "depth": b"[" * 100_000,
    "config": b'{"config": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "starts": b'{"start"' * 20_000,
    "long": b"x" * (5 << 20),
    "digits": b'{"step": ' + b"9" * 5000 + b', "values": {"loss": 1}}',
}


def mutated(random: random.Random, value: Any, odds: float = 0.25) -> Any:
    """Return a value, parts of which were replaced, removed or doubled."""
    if random.random() < odds / 2:
        return random.choice(ODD)
    if isinstance(value, dict):
        kept = {key: mutated(random, item, odds) for key, item in value.items() if random.random() > odds / 5}
        odd = {random.choice(["", "step", "time", "\ud800", "1e9"]): random.choice(ODD)}
        return kept | odd if odds > 0.4 else kept
    if isinstance(value, list):
        return [mutated(random, item, odds) for item in value]
    return value


def write(random: random.Random, file: Path, records: list[Any]) -> None:
    lines = [json.dumps(mutated(random, random.choice(records), random.random() / 2)) for _ in range(12)]
    content = bytearray("\n".join(lines).encode("utf-8", "surrogatepass") + b"\n" * (random.random() < 0.8))
    if random.random() < 0.2:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def show(folder: Path) -> None:
    """Show a folder in every view; only ReportError may leave it."""
    with suppress(ReportError):
        build_page(list(read_runs([folder])), version="1").encode()
    runs = RunFinder([folder])
    runs.update()
    Frame(runs, (), 120, 40).text(coloured=False)
    run = watched_run([folder])
    run.update()
    WatchFrame(run, 120, 40).text(coloured=True)


def fuzzed(folder: Path, seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        write(chance, folder / "metrics.jsonl", [*RECORDS, *[values(step, loss=1 / (1 + step)) for step in range(9)]])
        write(chance, folder / "ranks.jsonl", [WINDOW])
        write(chance, folder / "replicas.jsonl", LEFT_AND_JOINED)
        try:
            show(folder)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about values that are not finite
def test_damaged_records_are_shown_as_far_as_they_are_valid(tmp_path: Path) -> None:
    fuzzed(tmp_path, range(60))


@pytest.mark.nightly  # the same, longer
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_many_damaged_records_are_shown_as_far_as_they_are_valid(tmp_path: Path) -> None:
    fuzzed(tmp_path, range(60, 30_000))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_line_that_is_no_record_costs_neither_memory_nor_the_next_line(tmp_path: Path, attack: str) -> None:
    write_loss(tmp_path, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(ATTACKS[attack] + b"\n" + before)
    for name in ("ranks.jsonl", "replicas.jsonl"):
        (tmp_path / name).write_bytes(ATTACKS[attack] + b"\n")
    tracemalloc.start()
    run = RunRecords(tmp_path / "metrics.jsonl")
    run.update()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (run.skipped, len(run.scalars["loss"])) == (2 if attack == "starts" else 1, 3)
    assert most < 20 << 20
    show(tmp_path)
    assert "damaged line" in Frame(read_runs([tmp_path]), (), 120, 40).text(coloured=False)
    assert "damaged line" in WatchFrame(run, 120, 40).text(coloured=False)
    assert '"skipped":' in build_page([run], version="1")


def test_many_checkpoints_of_many_metrics_are_kept_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_LENGTHS", 100)
    monkeypatch.setattr(reading, "_MOST_SERIES", 20)
    logged = [values(step, **{f"m{step}": 1}) for step in range(30)]
    marks = [{"checkpoint": {"id": f"c{number}", "time": START}} for number in range(50)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*logged, *marks]))
    run = RunRecords(tmp_path / "metrics.jsonl")
    run.update()
    assert (len(run.scalars), run.skipped) == (20, 10)
    assert sum(len(snapshot.lengths) for snapshot in run._checkpoints.values()) <= 100
    assert "c49" in run._checkpoints


def test_pipes_and_folders_in_the_place_of_records_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_loss(tmp_path / "good")
    for name in ("piped", "beside"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "piped" / "metrics.jsonl")
    write_loss(tmp_path / "beside")
    os.mkfifo(tmp_path / "beside" / "ranks.jsonl")
    (tmp_path / "beside" / "replicas.jsonl").mkdir()
    assert {file.parent.name for file in find_files([tmp_path])} == {"good", "beside"}
    show(tmp_path)
    (tmp_path / "good" / "ranks.jsonl").write_text(json.dumps(WINDOW) + "\n")
    (tmp_path / "good" / "metrics.jsonl").unlink()
    (tmp_path / "good" / "metrics.jsonl").symlink_to(tmp_path / "piped" / "metrics.jsonl")
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl"):
        watch_command(watch_command_parser().parse_args([str(tmp_path / "good")]))


def test_short_names_of_many_runs_are_found_quickly() -> None:
    folders = [Path("/runs", f"group_{number % 7}", f"run_{number // 7}") for number in range(7000)]
    names = short_names(folders)
    assert len(set(names)) == 7000
    assert names[0] == "group_0/run_0"
