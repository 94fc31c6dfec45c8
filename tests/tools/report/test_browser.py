"""The page in a real browser: it draws, follows the pointer, and runs nothing that a name smuggles in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.tools.report.page.page import build_page
from meshwright.tools.report.runs.finding import read_runs
from tests.timing import limit
from tests.tools.report.browser import PROGRAM, Browser
from tests.tools.report.writing import LEFT_AND_JOINED, START, end, lines, start, values, write_run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")

EVIL = "</script><img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def write_page(folder: Path) -> Path:
    page = folder / "page.html"
    page.write_text(build_page(list(read_runs([folder])), version="2.0"), encoding="utf-8")
    return page


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    """Open a page of two runs with losses 1 and 2 and, by name, more of all there is."""
    for number, name in enumerate(("first", "second"), 1):
        records = [
            values(i, **{"train/loss": number, "train/accuracy": i, "eval/loss": 3 - i / 100, "lr": 1 / (1 + i)})
            for i in range(101)
        ]
        records[50]["values"]["train/loss"] = "NaN"
        records[60]["values"]["note"] = EVIL
        config = {"config": {"seed": number, "same": 1, EVIL: EVIL}}
        write_run(tmp_path / name, start(EVIL, torch="2.13"), config, *records, end(START + 100))
    browser.events.clear()
    browser.open(write_page(tmp_path))
    return browser


def plot(page: Browser, number: int) -> dict[str, float]:
    """Return where a chart is, after scrolling to it."""
    box: dict[str, float] = page.run(
        f"(() => {{ const plot = document.querySelectorAll('.card .plot')[{number}];"
        "plot.scrollIntoView({block: 'center'}); const {x, y, width, height} = plot.getBoundingClientRect();"
        "return {x, y, width, height}; })()"
    )
    page.settle()
    return box


def at(box: dict[str, float], share: float) -> tuple[float, float]:
    """Return the point at a share of a chart's horizontal axis."""
    return box["x"] + 56 + share * (box["width"] - 66), box["y"] + box["height"] / 2


def texts(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({selector!r})].map(found => found.textContent)")
    return found


def painted(page: Browser, number: int) -> int:
    """Return how many pixels of a chart are not empty."""
    count: int = page.run(
        f"(() => {{ const canvas = document.querySelectorAll('.card canvas')[{2 * number}];"
        "if (!canvas.width) return 0;"
        "const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "let count = 0; for (let i = 3; i < data.length; i += 4) count += data[i] > 0; return count; })()"
    )
    return count


def drawn(page: Browser, number: int) -> int:
    """Return the same of a chart in the window, once the page has seen that it is there."""
    page.wait(f"document.querySelectorAll('.card canvas')[{2 * number}].width > 0")
    page.settle()
    return painted(page, number)


def press(page: Browser, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")
    page.settle()


def axis_ends(page: Browser, number: int) -> list[float]:
    """Return the steps that the pointer finds at both ends of a chart's axis."""
    box = plot(page, number)
    ends = []
    for share in (0.0, 1.0):
        page.mouse("mouseMoved", *at(box, share))
        page.settle()
        ends.append(float(texts(page, "#tooltip strong")[0].removeprefix("step ").replace(",", "")))
    return ends


def test_every_chart_is_there_and_nothing_failed(page: Browser) -> None:
    dataset: dict[str, Any] = page.run("({...document.documentElement.dataset})")
    assert (dataset["charts"], dataset["errors"]) == ("5", "0"), dataset.get("firstError")
    assert texts(page, ".card h3") == ["train/loss", "train/accuracy", "eval/loss", "lr", "throughput (steps/s)"]
    assert drawn(page, 0) > 500
    assert texts(page, ".card:first-child .badge")[0] == "2 not finite"
    problems = [event for event in page.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert not problems
    asked = [
        event["params"]["request"]["url"][:5] for event in page.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert set(asked) <= {"file:", "data:"}


def test_a_name_that_looks_like_markup_is_only_text(page: Browser) -> None:
    assert texts(page, "h1") == [EVIL]
    assert page.run("document.title") == f"{EVIL} · report"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert EVIL in texts(page, "#configs td")
    assert EVIL in texts(page, "#texts td")


def test_the_policy_refuses_what_the_page_did_not_bring(page: Browser) -> None:
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))"
    )
    page.wait("document.documentElement.dataset.errors === '1'")
    assert page.run("document.title") != "1"
    assert "script-src" in page.run("document.documentElement.dataset.firstError")


def test_the_pointer_shows_the_values_of_all_runs_in_all_charts(page: Browser) -> None:
    page.mouse("mouseMoved", *at(plot(page, 1), 0.25))
    page.settle()
    assert texts(page, "#tooltip strong") == ["step 25"]
    assert texts(page, "#tooltip .tip-name") == ["first", "second"]
    assert texts(page, ".card:first-child .readout .now")[:2] == ["1", "2"]
    assert texts(page, ".card .readout .now")[4].startswith("2.75"), "another chart, at the same step"


def test_dragging_zooms_all_charts_and_a_double_click_goes_back(page: Browser) -> None:
    assert axis_ends(page, 1) == [0, 100]
    box = plot(page, 1)
    page.drag(*at(box, 0.5), at(box, 0.75)[0])
    for chart in (1, 3):
        assert axis_ends(page, chart) == pytest.approx([50, 75], abs=1)
    assert not page.run("document.getElementById('reset').hidden")
    page.click(*at(plot(page, 3), 0.5), times=2)
    assert axis_ends(page, 1) == [0, 100]
    assert not page.run("document.getElementById('large').open"), "the double click is no click"


def test_a_click_enlarges_and_closing_goes_back(page: Browser) -> None:
    page.click(*at(plot(page, 1), 0.5))
    page.wait("document.getElementById('large').open")
    assert texts(page, "dialog h3") == ["train/accuracy"]
    assert page.run("document.querySelector('dialog canvas').getBoundingClientRect().width") > 800
    page.settle()
    press(page, "dialog .head button:last-child")
    assert not page.run("document.getElementById('large').open")


def test_the_legend_of_every_chart_names_the_runs_that_are_shown(page: Browser) -> None:
    def named() -> list[list[str]]:
        found: list[list[str]] = page.run(
            "[...document.querySelectorAll('.card')].map(card => [...card.querySelectorAll('.readout .run')]"
            ".filter(name => name.offsetWidth && name.scrollWidth <= name.offsetWidth).map(name => name.textContent))"
        )
        return found

    plot(page, 0)
    assert named() == [["first", "second"]] * 5
    press(page, ".chip:nth-child(2)")
    assert named()[0] == ["first"]
    press(page, ".chip:nth-child(2)")


def test_runs_are_switched_off_and_on(page: Browser) -> None:
    press(page, ".chip:nth-child(2)")
    page.mouse("mouseMoved", *at(plot(page, 1), 0.5))
    page.settle()
    assert texts(page, "#tooltip .tip-name") == ["first"]
    assert page.run("document.querySelectorAll('#summary .hidden-run').length") == 1
    press(page, ".chip:nth-child(2)")
    assert page.run("document.querySelectorAll('#summary .hidden-run').length") == 0


def test_the_search_leaves_the_charts_with_all_its_words(page: Browser) -> None:
    def search(text: str) -> list[str]:
        page.run(f"(() => {{ const box = document.getElementById('search'); box.value = {text!r};"
                 "box.dispatchEvent(new Event('input')); })()")  # fmt: skip
        return texts(page, ".card:not([hidden]) h3")

    assert search("loss") == ["train/loss", "eval/loss"]
    assert search("LOSS train") == ["train/loss"]
    assert search("bleu") == []
    assert not page.run("document.getElementById('nothing').hidden")
    assert len(search("")) == 5


def test_outliers_leave_the_chart_with_a_mark_until_they_are_asked_for(browser: Browser, tmp_path: Path) -> None:
    def write(spike: float) -> str:
        losses = [2 + (i % 10) / 10 for i in range(200)]
        losses[100] = spike
        write_run(tmp_path / "run", start(), *(values(i, **{"train/loss": loss}) for i, loss in enumerate(losses)))
        browser.open(write_page(tmp_path))
        assert drawn(browser, 0) > 500
        picture: str = browser.run("document.querySelector('.card canvas').toDataURL()")
        return picture

    def outside() -> int:
        found: int = browser.run("document.querySelector('.card').chart.outside")
        return found

    plain = write(2.5)
    assert outside() == 0
    marked = write(1e6)
    assert outside() == 1
    assert marked != plain, "there is a mark"
    press(browser, "#clip")
    assert outside() == 0
    assert browser.run("document.querySelector('.card canvas').toDataURL()") != marked


def test_times_are_shown_as_times_and_the_meter_is_folded(browser: Browser, tmp_path: Path) -> None:
    records = [
        values(i, **{"loss": 1, "eval/seconds": 90 + i, "meter/seconds_left": 4000 - i, "meter/ends_at": START + 4000})
        for i in range(60)
    ]
    write_run(tmp_path / "2026-11-19_20-01-02", start(), *records)
    browser.open(write_page(tmp_path))
    assert texts(browser, ".chip") == ["digits"]
    folded = (
        "[...document.querySelectorAll('#groups details')].filter(group => !group.open).map(group => group.textContent)"
    )
    [meter] = browser.run(folded)
    assert "meter/seconds_left" in meter
    browser.run("document.querySelectorAll('#groups details').forEach(group => { group.open = true; })")
    names = texts(browser, ".card h3")
    shown = {}
    for number, name in enumerate(names):
        plot(browser, number)
        assert drawn(browser, number) > 100, name
        shown[name] = browser.run(f"document.querySelectorAll('.card')[{number}].querySelector('.now').textContent")
    assert shown["eval/seconds"] == "2 min 29 s"
    assert shown["meter/seconds_left"] == "1 h 05 min"
    assert shown["meter/ends_at"].startswith("2025-11-1")
    assert shown["loss"] == "1"
    press(browser, "#log")
    assert browser.run("document.documentElement.dataset.errors") == "0"


def test_every_axis_scale_and_theme_draws(page: Browser) -> None:
    before = page.run("document.querySelector('.card canvas').toDataURL()")
    seen = {before}
    for selector in ("[data-axis=relative]", "[data-axis=wall]", "#log", "#clip", "#theme"):
        press(page, selector)
        assert drawn(page, 0) > 500, selector
        seen.add(page.run("document.querySelector('.card canvas').toDataURL()"))
    page.run("(() => { const slider = document.getElementById('smoothing'); slider.value = 0;"
             "slider.dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.settle()
    seen.add(page.run("document.querySelector('.card canvas').toDataURL()"))
    assert len(seen) >= 6, "each of them changes the picture, but for clipping values that have no outliers"
    assert page.run("document.documentElement.dataset.errors") == "0"
    press(page, "#theme")  # the browser remembers it


def test_settings_that_differ_stand_first_and_are_marked(page: Browser) -> None:
    rows = texts(page, "#configs tr.differs")
    assert len(rows) == 1
    assert rows[0].startswith("seed")
    assert texts(page, "#configs tbody tr")[0].startswith("seed")
    press(page, "#configs .tools button")
    assert page.run("[...document.querySelectorAll('#configs tr.same')].every(row => !row.offsetHeight)")


def test_a_column_of_the_summary_sorts_the_runs(page: Browser) -> None:
    def order() -> list[str]:
        return texts(page, "#summary tbody .name")

    button = "#summary thead tr:nth-child(2) button"  # the last train/loss
    assert order() == ["first", "second"]
    press(page, button)
    press(page, button)
    assert order() == ["second", "first"]


def test_charts_outside_the_window_hold_no_pixels(browser: Browser, tmp_path: Path) -> None:
    records = [values(i, **{f"metric{k:02}": i for k in range(40)}) for i in range(5)]
    write_run(tmp_path / "a", start(), *records)
    browser.open(write_page(tmp_path))
    assert drawn(browser, 0) > 100
    assert painted(browser, 39) == 0
    plot(browser, 39)
    assert drawn(browser, 39) > 100
    assert painted(browser, 0) == 0


def test_a_page_of_a_hundred_and_fifty_long_curves_scrolls(browser: Browser, tmp_path: Path) -> None:
    for number in range(5):
        records = [values(i, **{f"metric{k:02}": (i * 7919 * (k + 1)) % 1000 for k in range(30)}) for i in range(2000)]
        write_run(tmp_path / f"run{number}", start(), *records)
    began = time.monotonic()
    browser.open(write_page(tmp_path))
    assert time.monotonic() - began < limit(10)
    frames = browser.run(
        "new Promise(done => { const times = []; let last = performance.now(), y = 0;"
        "const step = now => { times.push(now - last); last = now; scrollTo(0, y += 60);"
        "times.length < 80 ? requestAnimationFrame(step) : done(times.slice(2).sort((a, b) => a - b)); };"
        "requestAnimationFrame(step); })"
    )
    # 17 ms on an idle machine without a graphics card. The bound is far above it, and far below what
    # drawing all charts in every frame would take.
    assert frames[len(frames) // 2] < limit(100)


def test_who_left_and_who_joined_is_marked_in_charts_and_listed(browser: Browser, tmp_path: Path) -> None:
    records = [values(i, **{"train/loss": 1}) for i in range(21)]
    write_run(tmp_path / "run", start(), *records, end(START + 20))
    browser.open(write_page(tmp_path))
    before = drawn(browser, 0)
    (tmp_path / "run" / "replicas.jsonl").write_text(lines(LEFT_AND_JOINED))
    browser.open(write_page(tmp_path))
    assert drawn(browser, 0) > before + 200
    browser.mouse("mouseMoved", *at(plot(browser, 0), 4 / 20))
    browser.settle()
    assert texts(browser, "#tooltip .change") == ["rank 2 was killed by SIGKILL; 3 of 4 replicas"]
    assert texts(browser, "#replicas th")[2] == "run: 2 replacements, 0.4 s lost of 2.4 min"
    assert texts(browser, "#replicas tbody tr:nth-child(2) td")[1:] == [
        "12",
        "rank 2 joined after 8.0 s",
        "0.18 s",
        "4 of 4",
    ]
    assert browser.run("document.documentElement.dataset.errors") == "0"
