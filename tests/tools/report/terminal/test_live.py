"""The live view in a pseudo-terminal, and the frames it draws."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pexpect
import pytest

from meshwright.tools.report.runs.finding import RunFinder, read_runs
from meshwright.tools.report.runs.reading import RunRecords
from meshwright.tools.report.terminal.frame import Frame, recent_speed, total_steps
from meshwright.tools.report.terminal.ranks import WatchFrame
from meshwright.tools.report.terminal.text import columns
from tests.launching import COMMAND, environment
from tests.timing import limit
from tests.tools.report.writing import START, append, end, start, values, write_loss, write_run

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def live(folder: Path, *words: str, size: tuple[int, int] = (40, 110), **variables: str) -> pexpect.spawn:
    return pexpect.spawn(
        str(COMMAND),
        ["report", str(folder), "--live", "--interval", "0.1", *words],
        env=environment(folder, TERM="xterm", **variables),
        encoding="utf-8",
        dimensions=size,
        timeout=limit(20),
    )


def write_growing(folder: Path, steps: int = 10) -> Path:
    """Write a run that is at work right now."""
    now = time.time()
    logged = [values(step, time=now - steps + step, loss=1 / (1 + step)) for step in range(steps)]
    return write_run(folder, start(time=now - steps), *logged)


def frame(*places: Path, width: int = 100, height: int = 40, page: int = 0, wanted: tuple[str, ...] = ()) -> Frame:
    return Frame(read_runs(places), wanted, width, height, page)


def test_appended_values_appear_and_the_end_is_the_end(tmp_path: Path) -> None:
    folder = write_growing(tmp_path / "a")
    view = live(tmp_path)
    view.expect_exact(HIDE)
    view.expect("running.*step 9 ")
    append(folder, values(10, time=time.time(), loss=0.01, accuracy=0.5))
    view.expect("step 10 .*accuracy")
    append(folder, end(time.time()))
    view.expect_exact(SHOW)
    view.expect("finished.*all runs have ended")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0


def test_what_trackers_lost_stands_behind_the_facts_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", start(), values(1, loss=1), {"time": 1.0, "lost": {"wandb": 3}}, end())
    assert "· wandb lost 3 records" in frame(tmp_path).text(coloured=False)
    [run] = read_runs([folder])
    assert "· wandb lost 3 records" in WatchFrame(run, 120, 30).text(coloured=False)


def test_a_run_that_appears_later_is_shown(tmp_path: Path) -> None:
    write_growing(tmp_path / "first")
    view = live(tmp_path)
    view.expect("1 run[^s]")
    write_growing(tmp_path / "second")
    view.expect("2 runs")
    view.expect("second")
    view.sendintr()
    view.expect(pexpect.EOF)


def test_a_run_that_was_cut_off_long_ago_does_not_keep_the_view_open(tmp_path: Path) -> None:
    write_loss(tmp_path / "old", ended=False)
    folder = write_growing(tmp_path / "new")
    view = live(tmp_path)
    view.expect("running.*cut off")
    view.expect("q or Ctrl-C to leave")
    append(folder, end(time.time()))
    view.expect("finished.*cut off")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0


def test_a_view_of_runs_that_were_cut_off_waits_for_one_to_be_resumed(tmp_path: Path) -> None:
    folder = write_loss(tmp_path / "old", ended=False)
    view = live(tmp_path)
    view.expect("cut off")
    view.expect("cut off")
    append(folder, start(time=time.time()), values(10, time=time.time(), loss=1))
    view.expect("running")
    append(folder, end(time.time()))
    view.expect("all runs have ended")
    view.expect(pexpect.EOF)


@pytest.mark.parametrize("leave", ["interrupt", "q", "terminate"])
def test_leaving_restores_the_terminal(tmp_path: Path, leave: str) -> None:
    write_growing(tmp_path / "a")
    view = live(tmp_path)
    view.expect_exact(HIDE)
    view.expect("step 9 ")
    if leave == "interrupt":
        view.sendintr()
    elif leave == "q":
        view.send("q")
    else:
        view.kill(signal.SIGTERM)
    view.expect_exact(SHOW)
    view.expect(pexpect.EOF)
    after = view.before
    view.close()
    if leave == "terminate":
        assert view.exitstatus == 128 + signal.SIGTERM
    else:
        assert view.exitstatus == 0
        assert "step 9 " in after, "the last frame stays to be read"
        assert "Traceback" not in after


def test_a_new_size_of_the_window_is_followed(tmp_path: Path) -> None:
    write_growing(tmp_path / "a")
    view = live(tmp_path, "--interval", "60", NO_COLOR="1")
    view.expect("q or Ctrl-C to leave")
    assert max(map(columns, view.before.replace("\x1b[K", "").split("\r\n"))) > 60
    view.setwinsize(20, 50)
    view.expect_exact("\x1b[H")
    view.expect("q or Ctrl-C to leave")
    lines = view.before.replace("\x1b[K", "").split("\r\n")
    assert len(lines) <= 20
    assert 40 < max(map(columns, lines)) <= 50
    view.sendintr()
    view.expect(pexpect.EOF)


def test_colours_follow_no_color(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    for variables, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        view = live(tmp_path, **variables)
        view.expect(pexpect.EOF)
        assert ("\x1b[38;5;" in view.before) is coloured


def test_a_terminal_without_unicode_gets_letters(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    view = live(tmp_path, NO_COLOR="1", PYTHONIOENCODING="ascii")
    view.expect(pexpect.EOF)
    assert "**" in view.before
    assert view.before.isascii()


def test_arrows_turn_to_the_charts_that_have_no_room(tmp_path: Path) -> None:
    now = time.time()
    write_run(tmp_path / "a", start(time=now), *(values(i, time=now, loss=i, accuracy=i, lr=i) for i in range(5)))
    view = live(tmp_path, size=(14, 60))
    view.expect("charts 1/3")
    view.send("\x1b[C")
    view.expect("accuracy.*charts 2/3")
    view.send("\x1b[D")
    view.expect("charts 1/3")
    view.send("q")
    view.expect(pexpect.EOF)


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (80, 24), (133, 50), (250, 70)])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_frame_fits_its_terminal(tmp_path: Path, width: int, height: int, count: int) -> None:
    for number in range(count):
        records = [values(i, loss=i, accuracy=1 - i, **{f"m{k}/長い名前": i * k for k in range(5)}) for i in range(30)]
        write_run(tmp_path / f"run{number}", start(), *records)
    lines = frame(tmp_path, width=width, height=height).text(coloured=False).split("\n")
    assert len(lines) <= height
    assert max(map(columns, lines)) <= width


def test_a_curve_runs_from_its_first_to_its_last_value(tmp_path: Path) -> None:
    write_run(tmp_path / "a", start(), *(values(step, loss=step) for step in range(100)))
    lines = frame(tmp_path, width=60, height=20, wanted=("loss",)).text(coloured=False).split("\n")
    rows = [line.partition("┤")[2] or line.partition("│")[2] for line in lines if "┤" in line or "│" in line]
    first = [row.index(row.strip()) for row in rows]
    assert first == sorted(first, reverse=True), "a rising line"
    assert first[-1] == 0
    assert columns(rows[0]) == 60 - 10, "to the right edge"
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["99", "49.5", "0"]
    assert any(line.strip().startswith("└0") and line.endswith("99") for line in lines)


def test_a_single_run_shows_its_spike_and_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    records = [values(i, loss="NaN" if i == 7 else 50 if i == 4321 else 1) for i in range(10_000)]
    text = frame(write_run(tmp_path / "a", start(), *records)).text(coloured=False)
    assert "loss  1  1 not finite" in text
    assert "      50┤" in text


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    records = [values(step, **{"loss\x1b[2J\r\n": 1.0}) for step in range(3)]
    text = frame(write_run(tmp_path / "a", start("pro\x1b]0;x\x07ject"), *records)).text(coloured=False)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "loss·[2J··" in text


def test_only_the_latest_runs_are_shown_when_there_are_many(tmp_path: Path) -> None:
    for number in range(12):
        write_run(tmp_path / f"run{number:02}", start(), values(1, time=START + 100 - number, loss=1))
    text = frame(tmp_path).text(coloured=False)
    assert "8 runs · 4 older not shown" in text
    assert "run00" in text
    assert "run11" not in text


def test_speed_and_time_left_are_told_from_the_last_records(tmp_path: Path) -> None:
    now = time.time()
    slow = [values(step, time=now - 200 + step, loss=1) for step in range(100)]
    fast = [values(100 + step, time=now - 100 + step / 10, loss=1) for step in range(500)]
    folder = write_run(tmp_path / "a", start(time=now - 200), {"config": {"train": {"max_steps": 1600}}}, *slow, *fast)
    run = RunRecords(folder / "metrics.jsonl")
    run.update()
    assert recent_speed(run) == pytest.approx(10)
    assert total_steps(run) == 1600
    append(folder, {"time": time.time(), "step": 599, "system": {"memory/host": 1}})
    assert "about 1 min 40 s to step 1600" in frame(folder, width=150).text(coloured=False)


def test_before_anything_was_logged_it_says_what_it_waits_for(tmp_path: Path) -> None:
    runs = RunFinder([tmp_path])
    runs.update()
    assert f"waiting for a metrics.jsonl in {tmp_path}" in Frame(runs, (), 200, 20).text(coloured=False)
    write_run(tmp_path / "a", start())
    assert "no numbers were logged yet" in frame(tmp_path).text(coloured=False)
    write_loss(tmp_path / "b")
    assert "no metric matches bleu yet" in frame(tmp_path, wanted=("bleu",)).text(coloured=False)
