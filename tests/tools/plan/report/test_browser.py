"""The page of a plan in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.tools.plan.report.page import as_page
from tests.tools.plan.report.planned import planned
from tests.tools.report.browser import PROGRAM, Browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")
_WIDTHS = "[document.documentElement.scrollWidth, innerWidth, document.querySelector('svg').clientHeight]"


@pytest.mark.parametrize("width", [1280, 600])
def test_it_is_shown_without_complaints_and_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    file = tmp_path / "plan.html"
    file.write_text(as_page(planned(), "2.0"), encoding="utf-8")
    with Browser(tmp_path, width) as browser:
        browser.open(file, drawn="document.querySelector('svg') !== null && document.readyState === 'complete'")
        content, window, picture = browser.run(_WIDTHS)
        assert content <= window
        assert picture > 150
        complaints = ("Log.entryAdded", "Runtime.exceptionThrown")
        assert [event for event in browser.events if event["method"] in complaints] == []
