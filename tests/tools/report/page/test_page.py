"""The page: one file with everything in it, and nothing in it that could run but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.tools.report import ReportError
from meshwright.tools.report.page.page import build_page, flat, packed
from meshwright.tools.report.runs.finding import read_runs
from meshwright.tools.report.runs.reading import RunRecords
from tests.tools.report.writing import LEFT_AND_JOINED, START, end, lines, start, values, write_loss, write_run

EVIL = "</script><img src=x onerror=alert(1)><!--"


class Elements(HTMLParser):
    """Collect a page's elements with their attributes and texts, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag + (dict(attrs).get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page_of(*places: Path, **options: Any) -> str:
    return build_page(list(read_runs(places)), version="2.0", **options)


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Elements(page).texts["scriptdata"])
    return data


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text[1:]), {"f": "<f4", "d": "<f8"}[text[0]])


def shown(data: dict[str, Any], chart: int = 0, curve: int = 0, what: str = "shown") -> list[np.ndarray]:
    return [unpacked(data["arrays"][place]) for place in data["charts"][chart]["curves"][curve][what]]


def test_a_page_holds_what_was_logged(tmp_path: Path) -> None:
    records = [values(step, time=START + 2 * step, loss=1 / step) for step in (1, 2, 4)]
    folder = write_run(tmp_path / "a", start(torch="2.13"), {"config": {"o": {"lr": 0.1}}}, *records, end(START + 9))
    data = data_of(page_of(folder))
    assert data["title"] == "digits"
    run = data["runs"][0]
    assert (run["name"], run["state"], run["lastStep"], run["seconds"]) == ("a", "finished", 4.0, 9.0)
    assert (run["config"], run["facts"]) == ({"o.lr": "0.1"}, {"torch": "2.13"})
    step, when, value = shown(data)
    assert (step.tolist(), when.tolist(), value.tolist()) == ([1, 2, 4], [2, 4, 8], [1, 0.5, 0.25])
    curve = data["charts"][0]["curves"][0]
    assert (curve["total"], curve["last"], curve["min"], curve["max"]) == (3, 0.25, 0.25, 1.0)


def test_a_page_tells_what_trackers_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", start(), values(1, loss=1), {"time": START, "lost": {"wandb": 3}}, end())
    assert data_of(page_of(folder))["runs"][0]["lost"] == ["wandb lost 3 records"]
    assert data_of(page_of(write_loss(tmp_path / "b")))["runs"][0]["lost"] == []


def test_a_page_lists_who_left_and_who_joined_with_the_step_of_that_time(tmp_path: Path) -> None:
    (write_loss(tmp_path) / "replicas.jsonl").write_text(lines(LEFT_AND_JOINED))
    replicas = data_of(page_of(tmp_path))["runs"][0]["replicas"]
    assert replicas["total"] == "2 replacements, 0.4 s lost of 2.4 min"
    assert [(change["step"], change["text"], change["seconds"]) for change in replicas["changes"]] == [
        (4, "rank 2 was killed by SIGKILL", 0.21),
        (12, "rank 2 joined after 8.0 s", 0.18),
        (15, "rank 1 left: no heartbeat for 15 s", None),
    ]


def test_a_page_asks_for_nothing_from_anywhere(tmp_path: Path) -> None:
    page = page_of(write_loss(tmp_path / "a"))
    elements = Elements(page)
    links = [value for _, attributes in elements.found for name, value in attributes.items() if name in ("src", "href")]
    assert len(links) == 1
    assert str(links[0]).startswith("data:image/svg+xml,"), "its icon"
    script = elements.texts["script"] + elements.texts["style"]
    assert not re.findall(r"https?://|//[a-z]|\bfetch\b|XMLHttpRequest|\beval\(|new Function|@import|innerHTML", script)


def test_only_the_pages_own_script_and_style_may_run(tmp_path: Path) -> None:
    elements = Elements(page_of(write_loss(tmp_path / "a")))
    policy = next(str(m["content"]) for m in elements.tags("meta") if m.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


def test_names_that_look_like_markup_stay_text(tmp_path: Path) -> None:
    plain, evil = write_loss(tmp_path / "plain"), tmp_path / EVIL.replace("/", "")
    record = values(1, **{EVIL: 1.0, "{{DATA}}": 2.0, "text": EVIL})
    write_run(evil, start(EVIL), {"config": {EVIL: EVIL}}, record, end())
    page = page_of(evil)
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(page_of(plain)).found]
    data = data_of(page)
    assert data["title"] == EVIL
    assert {chart["name"] for chart in data["charts"]} == {EVIL, "{{DATA}}"}
    assert data["texts"][0]["text"] == EVIL
    assert data["runs"][0]["config"] == {EVIL: EVIL}


def test_half_characters_do_not_stop_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", start("\ud800"), values(1, **{"\udfff": 1.0, "löss ✓": 2.0}))
    assert "löss ✓" in page_of(folder).encode("utf-8").decode("utf-8")


def test_long_curves_keep_their_extremes_and_say_how_many_points_there_were(tmp_path: Path) -> None:
    spikes = {77_777: 9.0, 12_345: -9.0}
    records = [values(step, loss=spikes.get(step, step % 7 / 7)) for step in range(100_000)]
    data = data_of(page_of(write_run(tmp_path / "a", start(), *records)))
    step, _, value = shown(data)
    assert data["charts"][0]["curves"][0]["total"] == 100_000
    assert len(value) <= data["limit"] == 2000
    assert {step[value.argmax()], step[value.argmin()]} == set(spikes)
    assert len(shown(data, what="means")[0]) == 500


def test_the_limit_of_points_can_be_chosen(tmp_path: Path) -> None:
    data = data_of(page_of(write_loss(tmp_path / "a", 1000), points=100))
    assert data["limit"] == 100
    assert len(shown(data)[0]) <= 100


def test_values_that_are_not_finite_are_counted_and_placed(tmp_path: Path) -> None:
    records = [values(step, loss="NaN" if step in (3, 4) else 1.0) for step in range(6)]
    data = data_of(page_of(write_run(tmp_path / "a", start(), *records, values(6, loss="-Infinity"))))
    curve = data["charts"][0]["curves"][0]
    assert (curve["bad"], curve["last"], curve["min"]) == (3, None, 1.0)
    assert shown(data, what="marks")[0].tolist() == [3, 4, 6]


def test_steps_that_several_metrics_share_are_written_once(tmp_path: Path) -> None:
    records = [values(step, a=step * 0.5, b=step * 0.25, c=step * 0.125) for step in range(10)]
    data = data_of(page_of(write_run(tmp_path / "a", start(), *records)))
    charts = {chart["name"]: chart["curves"][0]["shown"] for chart in data["charts"]}
    assert charts["a"][:2] == charts["b"][:2] == charts["c"][:2]
    assert len({charts["a"][2], charts["b"][2], charts["c"][2]}) == 3


@pytest.mark.parametrize(
    ("numbers", "exact", "width"),
    [
        ([0.1, 0.2, np.nan], False, "f"),
        ([1.0, 2.0**24 - 1], True, "f"),
        ([1.0, 2.0**24 + 1], True, "d"),
        ([0.1, 0.2], True, "d"),
        ([1e300, 1.0], False, "d"),
        ([1e-300, 1.0], False, "d"),
        ([1_000_000.01, 1_000_000.02], False, "d"),
    ],
)
def test_numbers_are_short_where_nothing_is_lost(numbers: list[float], exact: bool, width: str) -> None:
    text = packed(np.array(numbers), exact)
    assert text[0] == width
    assert np.allclose(unpacked(text), numbers, rtol=1e-6, equal_nan=True)


def test_nested_settings_become_lines() -> None:
    config = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": {}, "g": "text", "h": True}
    assert dict(flat(config)) == {"a.b.c": "1", "a.d": "[1, 2]", "e": "null", "f": "{}", "g": "text", "h": "true"}


def test_only_the_last_texts_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    records = [values(step, loss=1, note=f"text {step}") for step in range(250)]
    data = data_of(page_of(write_run(tmp_path / "a", start(), *records)))
    assert (len(data["texts"]), data["texts"][-1]["text"], data["textsLeftOut"]) == (200, "text 249", 50)


def test_runs_without_numbers_are_refused_with_what_to_log(tmp_path: Path) -> None:
    write_run(tmp_path / "a", start(), {"config": {"lr": 1}}, values(1, note="only text"))
    with pytest.raises(ReportError, match=r"no numbers to draw in 1 run.*accelerator\.log"):
        page_of(tmp_path)


def test_a_metric_that_nobody_has_is_answered_with_those_there_are(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    assert [chart["name"] for chart in data_of(page_of(tmp_path, wanted=["loss"]))["charts"]] == ["loss"]
    with pytest.raises(ReportError, match=r"no metric matches bleu\. The runs have: loss\."):
        page_of(tmp_path, wanted=["bleu"])


def test_a_page_of_very_many_curves_keeps_its_size_by_fewer_points_each(tmp_path: Path) -> None:
    names = [f"layer{i}/norm" for i in range(600)]
    records = [values(step, **{name: float(np.sin(step + i)) for i, name in enumerate(names)}) for step in range(1200)]
    page = page_of(write_run(tmp_path / "a", start(), *records))
    data = data_of(page)
    assert data["limit"] == 500_000 // 601, "with the throughput"
    assert len(page) <= 10e6


def test_an_empty_run_beside_others_is_listed(tmp_path: Path) -> None:
    write_loss(tmp_path / "a")
    write_run(tmp_path / "empty")
    runs: list[RunRecords] = list(read_runs([tmp_path]))
    assert [run["name"] for run in data_of(build_page(runs, version="2.0"))["runs"]] == ["a", "empty"]


SIMULATED = {
    "common": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}
"""How linear RGB is seen, after Machado, Oliveira and Fernandes (2009)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ light.clip(0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("theme", "card"), [("light", "#ffffff"), ("dark", "#171c23")])
def test_the_colours_of_runs_are_told_apart_by_colour_blind_people(tmp_path: Path, theme: str, card: str) -> None:
    """A difference of 10 in CIELAB is seen at a glance."""
    page = page_of(write_loss(tmp_path / "a"))
    palette = re.findall(r"#[0-9a-f]{6}", re.search(rf"{theme}: \[(.*?)\]", page)[1])
    assert len(palette) == 8
    assert f"light-dark(#ffffff, {card})" in page or theme == "light"
    for seen in SIMULATED.values():
        for one, other in combinations(palette, 2):
            assert np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other))) > 18, (one, other)
    for colour in palette:
        dark, bright = sorted((TO_XYZ[1] @ linear(colour), TO_XYZ[1] @ linear(card)))
        assert (bright + 0.05) / (dark + 0.05) > 2.9, f"{colour} is too faint"
