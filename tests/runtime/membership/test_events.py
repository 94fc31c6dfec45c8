"""Every process derives the same members from the events in the store."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, TCPStore

from meshwright.runtime.membership.events import PREFIX, SUPERSEDED, Events, connect


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def address(server: TCPStore) -> str:
    return f"127.0.0.1:{server.port}"


def test_members_are_what_the_events_leave() -> None:
    events = Events(HashStore(), 4)
    assert events.members(0) == (0, 1, 2, 3)
    assert events.publish("left", [2, 0], "killed") == 1
    assert events.publish("broken", [], "a collective failed") == 2
    assert events.publish("joined", [2], "") == 3
    assert [events.members(epoch) for epoch in range(4)] == [(0, 1, 2, 3), (1, 3), (1, 3), (1, 2, 3)]
    assert events.newest() == 3
    assert (events.read(1).kind, events.read(1).ranks, events.read(1).reason) == ("left", (0, 2), "killed")


def test_publishers_get_different_numbers_and_read_the_same_events(server: TCPStore) -> None:
    logs = [Events(connect(address(server)), 8) for _ in range(4)]
    numbers: list[int] = []

    def publish(events: Events, rank: int) -> None:
        numbers.extend(events.publish(kind, [rank], "") for kind in ("left", "joined", "left"))

    threads = [threading.Thread(target=publish, args=(events, rank)) for rank, events in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 13))
    assert {events.members(12) for events in logs} == {(4, 5, 6, 7)}
    assert len({tuple(events.read(number) for number in range(1, 13)) for events in logs}) == 1


def test_an_event_supersedes_the_agreement_on_the_epoch_before_but_no_agreement_that_was_reached() -> None:
    store = HashStore()
    store.set("go/1", "{}")
    events = Events(store, 2)
    events.publish("left", [0], "")
    events.publish("joined", [0], "")
    assert [store.get(f"go/{epoch}").decode() for epoch in (0, 1)] == [SUPERSEDED, "{}"]
    assert not store.check(["go/2"])


FORGED = {
    "no JSON": "not json",
    "another value": "[1]",
    "an infinite rank": '{"kind": "left", "ranks": [Infinity], "reason": "", "time": 1.0}',
    "no rank": '{"kind": "left", "ranks": [-1], "reason": "", "time": 1.0}',
    "a rank beyond": '{"kind": "joined", "ranks": [4], "reason": "", "time": 1.0}',
    "another kind": '{"kind": "leave", "ranks": [1], "reason": "", "time": 1.0}',
    "another field": '{"kind": "left", "ranks": [1], "reason": "", "time": 1.0, "x": 1}',
    "brackets": "[" * 100_000,
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("what", FORGED)
def test_an_event_that_another_program_wrote_changes_no_members_and_leaves_no_gap(what: str) -> None:
    store = HashStore()
    store.set("event/1", FORGED[what])
    reasons: list[str] = []
    events, others = Events(store, 4, on_unreadable=reasons.append), Events(store, 4)
    assert events.newest() == 1
    assert (events.read(1).kind, events.members(1)) == ("broken", (0, 1, 2, 3))
    assert reasons == [events.read(1).reason]
    assert reasons[0].startswith("event/1 in the store of the run ")
    assert store.get("go/0").decode() == SUPERSEDED, "nobody waits for an agreement on the epoch before"
    assert others.publish("left", [2], "killed") == 2
    assert events.members(2) == (0, 1, 3)


def test_the_reason_of_an_event_can_be_printed() -> None:
    store = HashStore()
    Events(store, 2).publish("left", [1], "\x1b]0;pwn\x07\x1b[2J gone")
    assert Events(store, 2).read(1).reason == "·]0;pwn··[2J gone"


def test_a_publisher_that_was_killed_before_it_superseded_holds_nobody_up() -> None:
    store = HashStore()
    killed, other = Events(store, 3), Events(store, 3)
    other.publish("left", [0], "")
    killed._superseded = 2  # it wrote its event and got no further
    killed.publish("broken", [], "")
    other.publish("left", [1], "")
    assert [store.get(f"go/{epoch}").decode() for epoch in range(3)] == [SUPERSEDED] * 3


def test_training_has_begun_when_a_member_says_so(server: TCPStore) -> None:
    member, launcher = Events(connect(address(server)), 2), Events(connect(address(server)), 2)
    assert not launcher.has_begun()
    member.mark_begun()
    assert member.has_begun(), "an answer, so that the store has it"
    assert launcher.has_begun()
    assert server.check([f"{PREFIX}/begun"])
