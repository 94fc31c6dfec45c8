"""Members of a run under `--survive`: who keeps the others waiting is named, and removed only on request."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from meshwright.runtime.membership.member import Member, now
from meshwright.watch.hangs.members import Answer, MemberWatcher

LINE = "train.py:31, in the script's own code: `rows = read(path)`"


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Return three members; no thread of theirs trains."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    made = [Member(f"localhost:{server.port}", rank=rank, replicas=3, incarnation=0) for rank in range(3)]
    yield made
    for member in made:
        member.close()
    assert server.port > 0, "the store outlives the members"


def judged(member: Member, answers: list[Answer], waited: float, replace_after: float | None) -> list[tuple[int, ...]]:
    """Let a member judge answers, and return who left."""
    watcher = MemberWatcher(member, 30.0, replace_after)
    watcher.stop()
    watcher._judge(member.store, answers, waited)
    return [member.events.read(number).ranks for number in range(1, member.events.newest() + 1)]


def answers(hanging: int, *, in_debugger: bool = False) -> list[Answer]:
    return [
        Answer(rank=rank, waits=rank >= hanging, in_debugger=in_debugger and rank < hanging, place=LINE)
        for rank in range(3)
    ]


def test_who_does_not_wait_is_named_and_stays(members: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert judged(members[1], answers(1), 31.0, None) == []
    assert f"Rank 0 has kept 2 others waiting for 31 s: {LINE}" in caplog.text
    note = json.loads(members[1].store.get("note/1"))
    assert (note["kind"], note["ranks"]) == ("hangs", [0])


def test_it_is_removed_after_the_time_that_was_asked_for(members: list[Member]) -> None:
    assert judged(members[1], answers(1), 59.0, 60.0) == []
    assert judged(members[1], answers(1), 61.0, 60.0) == [(0,)]
    assert members[2].events.read(1).reason == f"it kept the others waiting for 61 s at {LINE}"


@pytest.mark.parametrize(("hanging", "in_debugger"), [(1, True), (2, False)])
def test_who_is_debugged_and_a_majority_are_not_removed(members: list[Member], hanging: int, in_debugger: bool) -> None:
    assert judged(members[2], answers(hanging, in_debugger=in_debugger), 61.0, 60.0) == []


def test_members_that_all_wait_are_told_where(members: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert judged(members[0], answers(0), 31.0, 60.0) == []
    assert f"All members have waited for each other for 31 s, at rank 0: {LINE}; rank 1: " in caplog.text


def test_a_member_that_gives_no_answer_is_named(members: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert judged(members[1], answers(0)[1:], 31.0, 60.0) == []
    assert "Rank 0 did not say where it is, after others waited for 31 s" in caplog.text
    assert "waited for each other" not in caplog.text


def test_one_member_asks_and_all_answer(members: list[Member], caplog: pytest.LogCaptureFixture) -> None:
    for member in members[1:]:
        member.waiting_since = now() - 100
    watchers = [MemberWatcher(member, 0.4, None) for member in members]
    deadline = now() + 60
    while "others waiting" not in caplog.text and now() < deadline:  # not by the store: that would be a collective
        time.sleep(0.05)
    for watcher in watchers:
        watcher.stop()
    assert members[0].store.check(["note/1"]), caplog.text
    note = json.loads(members[0].store.get("note/1"))
    assert note["ranks"] == [0]
    assert re.match(r"rank 0 has kept 2 others waiting for 1\d\d s: test_members.py:\d+, in ", note["reason"])
    assert not members[0].store.check(["note/2"]), "one of those that wait asks for all of them"
