"""The text, the JSON and the page of a plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from meshwright.tools.plan.memory.peak import Timeline
from meshwright.tools.plan.report.data import as_json
from meshwright.tools.plan.report.numbers import amount, duration, mesh, module_name, size
from meshwright.tools.plan.report.page import as_page
from meshwright.tools.plan.report.picture import picture
from meshwright.tools.plan.report.tables import fit_table
from meshwright.tools.plan.report.text import as_text
from meshwright.tools.plan.result import Plan
from meshwright.tools.plan.trace import OWNERS, WEIGHTS
from tests.tools.plan.report.planned import planned


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", ""),
        ("module", ""),
        ("module.head", "head"),
        ("modules.head", "modules.head"),
        ("module.layers.*.mlp", "mlp in each of layers"),
        ("layers.*", "each of layers"),
        ("*", "each block"),
        ("a.*.experts.*.w", "w in each of experts in each of a"),
    ],
)
def test_modules_have_the_names_that_their_owner_knows(name: str, shown: str) -> None:
    assert module_name(name) == shown


def test_a_plan_without_levers_says_so(plan: Plan) -> None:
    assert "No setting that the plan knows saves 1 % of the peak or more." in as_text(replace(plan, levers=[]))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_the_text_answers_first(plan: Plan) -> None:
    text = as_text(plan)
    head = " ".join(text.split("\n\n")[0].split())  # a narrow terminal breaks lines
    assert f"{size(plan.largest.memory.total)} at the peak of rank 0: step 2, " in head
    assert re.search(r"H100-SXM +fits: \S+ GiB remain of 79.1 GiB, with 1000 MiB for driver and libraries", head)
    assert "1.25 s (1.00 s to 1.50 s)" in head
    assert "419 k tokens/s, 6,554 per device" in head
    assert "1,000 steps (524 M tokens): 0.3 h (0.3 to 0.4), 22 device-hours, 56 at 2.5 per device" in head
    assert "3 of 12 repeated blocks traced" in head


def test_the_text_has_every_table(plan: Plan) -> None:
    text = as_text(plan)
    for words in (
        "memory per rank",
        "what saves memory",
        "communication of rank 0",
        "search",
        "guessed",
        "cannot know",
    ):
        assert re.search(f"^── .*{words}", text, re.MULTILINE)
    assert "train.py:31 loss.item()" in text
    assert re.search(r"A100-40GB +tight", text)
    assert re.search(r"all_gather +dp_shard +4 +12 .* 300 ms +80 %", text)
    assert "--fsdp_offload_params true" in text
    assert "1. meshwright launch --use_fsdp train.py" in text
    assert all(len(line) <= 120 for line in text.splitlines() if "--" not in line)


def test_devices_with_about_enough_memory_are_shown_first(plan: Plan) -> None:
    own = plan.fits[0]
    others = [replace(own, device=f"{size} GiB", capacity=size * 2**30) for size in range(10, 90, 10)]
    many = replace(plan, fits=[own, *others])
    names = [row[0] for row in fit_table(many, near=True).rows]
    assert names == ["H100-SXM", *(f"{size} GiB" for size in (10, 20, 30, 40, 50, 60))]
    assert len(fit_table(many).rows) == 9


def test_the_json_holds_the_same_numbers(plan: Plan) -> None:
    data = json.loads(as_json(plan))
    assert data["ranks"][0]["memory"]["total"] == plan.largest.memory.total
    assert sum(data["ranks"][0]["memory"]["peak"]["bytes"].values()) == plan.largest.memory.total
    assert data["fits"][0]["verdict"] == "fits"
    assert data["cost"]["device_hours"] == pytest.approx(22.4)
    assert data["rates"]["low"] == 1.0
    assert data["candidates"][0]["command"].startswith("meshwright launch")


class Tags(HTMLParser):
    """Collect tags and check that they nest."""

    VOID = ("meta", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and tag != "polyline":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def test_the_page_is_complete_and_loads_nothing(plan: Plan) -> None:
    tags = Tags()
    tags.feed(as_page(plan, "2.0"))
    assert tags.open == []
    assert tags.addresses == []
    assert tags.seen.count("svg") == 1
    assert tags.seen.count("table") == 7


def test_words_of_the_user_are_no_markup() -> None:
    page = as_page(planned(guesses=("<script>alert(1)</script>",)), "2.0")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_picture_stacks_all_owners_to_the_peak(plan: Plan) -> None:
    drawn = picture(plan.largest.memory.timeline, 60 * 2**30, "H100")
    assert len(re.findall("<polygon", drawn)) == sum(1 for owner in OWNERS if plan.largest.memory.most[owner])
    assert "H100: 60.0 GiB for the allocator" in drawn
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", drawn)]
    assert min(heights) > 0
    assert max(heights) <= 340


def test_a_capacity_far_above_is_not_drawn(plan: Plan) -> None:
    assert "capacity" not in picture(plan.largest.memory.timeline, 9000 * 2**30, "H100")
    assert picture(Timeline()) == ""


def test_a_picture_of_few_bytes_has_an_axis() -> None:
    line = Timeline([0.5], {WEIGHTS: [700.0]}, [2048.0], [(0.0, "forward")])
    assert ">KiB<" in picture(line)


def test_numbers_are_short() -> None:
    assert [size(n) for n in (0, 1000, 1536, 61.23 * 2**30)] == ["0 B", "1000 B", "1.50 KiB", "61.2 GiB"]
    assert [amount(n) for n in (8, 1234, 45_000, 8.03e9)] == ["8", "1,234", "45.0 k", "8.03 B"]
    assert [duration(s) for s in (0.0123, 1.5, 150, 7200)] == ["12.3 ms", "1.50 s", "2.5 min", "2.0 h"]
    assert mesh({"dp_shard": 8, "tp": 2, "cp": 1}) == "dp_shard 8 x tp 2"
