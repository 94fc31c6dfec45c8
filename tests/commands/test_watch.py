"""`meshwright watch`, as people type it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.launching import COMMAND, Launched, environment, run_accelerate
from tests.timing import limit
from tests.tools.report.page.test_page import data_of
from tests.tools.report.writing import LEFT_AND_JOINED, append, end, lines, start, values, write_run

PHASES = ["data", "forward", "backward", "step", "saving", "waiting", "other"]
TOLD = "Rank 1 is slow in waiting for data: 0.060 s per step, where the others need 0.030 s."


def watch(directory: Path, *words: object, **variables: str) -> Launched:
    return run_accelerate("watch", *words, directory=directory, **variables)


def window(step: int, slow: bool = False, ranks: int = 4, ago: float = 0.0) -> dict[str, Any]:
    """Return a line as the watcher writes it: 80 ms per step, of which rank 1 may wait longer for data."""
    usual, late = [30_000, 20_000, 30_000, 0, 0, 0, 0], [60_000, 20_000, 0, 0, 0, 0, 0]
    times = {str(rank): late if slow and rank == 1 else usual for rank in range(ranks)}
    line = {"time": time.time() - ago, "step": step, "steps": 10, "of": ranks, "phases": PHASES, "ranks": times}
    return line | ({"straggler": {"rank": 1, "phase": "data", "cost": 0.375, "text": TOLD}} if slow else {})


def write_windows(folder: Path, *windows: dict[str, Any], tail: str = "") -> None:
    with (folder / "ranks.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in windows) + tail)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that is at work right now."""
    now = time.time()
    return write_run(tmp_path / "runs" / "digits" / "first", start(time=now), values(1, time=now, loss=1))


def test_a_rank_is_a_line_of_phases_and_the_slow_one_is_marked(tmp_path: Path, run: Path) -> None:
    write_windows(run, window(10), window(20, slow=True), tail='{"time": 1, "step": 3')  # a line that is being written
    seen = watch(tmp_path, COLUMNS="96")
    assert seen.code == 0, seen.complaints
    lines = seen.printed.splitlines()
    assert lines[0].startswith("first  running  step 20 · 4 ranks · ")
    assert " ".join(lines[2].split()) == "rank d data f forward b backward step ms data forward backward"
    assert lines[3].split() == ["0", "d" * 18 + "f" * 12 + "b" * 18, "80.0", "30.0", "20.0", "30.0"]
    assert lines[4].split() == ["→", "1", "d" * 36 + "f" * 12, "80.0", "60.0", "20.0", "0.0"]
    assert lines[8] == TOLD
    assert max(map(len, lines)) <= 96


def test_it_is_a_live_report_of_the_ranks(tmp_path: Path, run: Path) -> None:
    def without_age(seen: Launched) -> str:
        return re.sub(r"[\d.]+ (ms|s) ago", "ago", seen.printed)

    write_windows(run, window(10))
    words = ("report", "--live", "--ranks")
    assert without_age(run_accelerate(*words, "runs", directory=tmp_path)) == without_age(watch(tmp_path))
    assert "Add --live" in run_accelerate("report", "--ranks", directory=tmp_path).complaints
    refused = run_accelerate(*words, "--metric", "loss", directory=tmp_path)
    assert (refused.code, "--ranks shows no metrics. Leave --metric out." in refused.complaints) == (1, True)


def test_what_was_slow_before_is_told_with_its_time(tmp_path: Path, run: Path) -> None:
    write_windows(run, window(10, slow=True, ago=125), window(20))
    printed = watch(tmp_path, "runs/digits", COLUMNS="150").printed
    assert "→" not in printed
    told = re.search(rf"No rank is slow now\. 2 min (\d\d) s ago: {re.escape(TOLD)}", printed)
    assert told is not None, printed
    assert int(told[1]) >= 5


def test_a_narrow_terminal_has_bars_only_and_of_very_many_ranks_some_are_shown(tmp_path: Path, run: Path) -> None:
    line = window(10, ranks=18)
    write_windows(run, line | {"of": 1024})
    printed = watch(tmp_path, run, COLUMNS="48").printed
    assert "1024 ranks, 18 of them shown" in watch(tmp_path, run, COLUMNS="100").printed
    assert "80.0" not in printed
    assert max(map(len, printed.splitlines())) <= 48


def test_the_newest_of_several_runs_is_shown(tmp_path: Path, run: Path) -> None:
    other = write_run(run.parent / "second", start(), values(1, loss=1))
    write_windows(run, window(10))
    time.sleep(0.02)
    write_windows(other, window(30))
    assert watch(tmp_path).printed.startswith("second  ")
    assert watch(tmp_path, run / "metrics.jsonl").printed.startswith("first  ")


def test_without_lines_about_ranks_it_says_what_to_do(tmp_path: Path, run: Path) -> None:
    refused = watch(tmp_path)
    assert refused.code == 1
    assert refused.complaints.startswith("meshwright watch: no ranks.jsonl in runs or below. It is written beside ")
    assert "at least 2 processes" in refused.complaints
    assert "there is no folder elsewhere" in watch(tmp_path, "elsewhere").complaints


def test_help_answers_without_numpy(tmp_path: Path) -> None:
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    helped = watch(tmp_path, "--help", PYTHONPATH=str(tmp_path))
    assert helped.code == 0, helped.complaints
    assert "RUN_DIR" in helped.printed


@pytest.mark.parametrize("words", [("watch",), ("report",), ("report", "--live")])
def test_what_was_logged_is_shown_without_torch(words: tuple[str, ...], tmp_path: Path, run: Path) -> None:
    write_windows(run, window(10))
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    shown = run_accelerate(*words, directory=tmp_path, PYTHONPATH=str(tmp_path))
    assert (shown.code, shown.complaints) == (0, "")


def test_live_it_follows_the_run_to_its_end(tmp_path: Path, run: Path) -> None:
    write_windows(run, window(10))
    view = pexpect.spawn(
        str(COMMAND),
        ["watch", str(run), "--interval", "0.1"],
        env=environment(tmp_path, TERM="xterm"),
        encoding="utf-8",
        dimensions=(10, 100),
        timeout=limit(20),
    )
    view.expect("step 10 .*No rank is slow.*ranks 1/2")
    view.send("n")
    view.expect("ranks 2/2")
    write_windows(run, window(20, slow=True))
    view.expect("step 20 .*Rank 1 is slow in waiting for data")
    view.setwinsize(30, 100)
    view.expect("→ +1 .*█")
    append(run, end(time.time()))
    view.expect("finished")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0


def test_the_page_shows_the_ranks_too(tmp_path: Path, run: Path) -> None:
    write_windows(run, window(10), window(20, slow=True))
    assert run_accelerate("report", run, directory=tmp_path).code == 0
    (shown,) = data_of((run / "report.html").read_text(encoding="utf-8"))["runs"]
    assert shown["ranks"] == {
        "step": 20,
        "of": 4,
        "phases": [["data", 0], ["forward", 1], ["backward", 2]],
        "rows": [[0, 30, 20, 30], [1, 60, 20, 0], [2, 30, 20, 30], [3, 30, 20, 30]],
        "slow": [1, "data"],
        "message": [20, TOLD],
    }


def test_who_left_and_who_joined_is_listed_with_its_cost(tmp_path: Path, run: Path) -> None:
    (run / "replicas.jsonl").write_text(lines(LEFT_AND_JOINED))
    seen = watch(tmp_path, COLUMNS="96")  # also before the times of steps are known
    assert seen.code == 0, seen.complaints
    printed = seen.printed.splitlines()
    assert printed[2] == "3 of 4 replicas train · 2 replacements, 0.4 s lost of 2.4 min"
    assert printed[4].endswith(" ago    0.21 s         3  rank 2 was killed by SIGKILL")
    assert printed[5].endswith(" ago    0.18 s         4  rank 2 joined after 8.0 s")
    assert printed[6].endswith(" ago                   3  rank 1 left: no heartbeat for 15 s")
    write_windows(run, window(10))
    both = watch(tmp_path, COLUMNS="96").printed
    assert "80.0" in both
    assert "rank 2 joined after 8.0 s" in both
