"""The page of what runs as under accelerate 1.15 is what was found, and nothing on it is without a reason."""

from __future__ import annotations

from tests.ecosystem import published_scripts, published_tests
from tests.ecosystem.conformance import PAGE, make_page


def test_the_committed_page_is_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run `python -m tests.ecosystem.conformance`"


def test_every_test_that_fails_here_has_a_reason() -> None:
    reasons = published_tests.read_reasons()
    failed = published_tests.fails_here(published_tests.read_found())
    assert [test for test in failed if not published_tests.reason_of(test, reasons)[0]] == []
    unused = [begin for begin in reasons if not any(test.startswith(begin) for test in failed)]
    assert unused == [], "these pass now"


def test_every_script_that_differs_has_a_reason() -> None:
    found, reasons = published_scripts.read_found(), published_scripts.read_reasons()
    differ = {run for run, (_, result) in found.items() if result != "equal"}
    assert differ == set(reasons)
