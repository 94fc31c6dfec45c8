"""The store of many members, in a small form: real members and launchers agree, and their requests are counted."""

from __future__ import annotations

import pytest

from benchmarks.agreement import lose_one


@pytest.mark.nightly  # tests/parallel/replicas lose members, too
def test_the_members_that_are_left_agree_and_what_they_ask_is_counted() -> None:
    found = lose_one(members=6, machines=2, seconds_of_health=1.0)
    assert 0 < found.median <= found.last < 30
    assert found.requests["set"] == 5, "one status each"
    assert found.requests["multi_get"] == 1, "one member reads them"
    assert found.requests_in_health > 6  # each looks ten times per second, and sends one heartbeat
