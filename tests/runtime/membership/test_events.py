"""Every process derives the same members from the events in the store."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, TCPStore

from accelerate.runtime.membership.events import PREFIX, SUPERSEDED, Events, connect


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
