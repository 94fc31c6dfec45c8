"""A member that waits for a collective: what ends the wait, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.membership.events import PREFIX
from meshwright.runtime.membership.member import Member, MembershipChanged


@pytest.fixture
def member() -> Iterator[Member]:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    member = Member(f"localhost:{server.port}", rank=0, replicas=2, incarnation=0)
    yield member
    member.close()
    assert dist.PrefixStore(PREFIX, server).add("lost_ms", 0) >= 0, "the store outlives the member"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("go/0", "[["),
        ("go/0", '[[{"exchanges": 1}, [[0, 0]]]]'),
        ("go/0", b"\xff"),
        ("event/1", "not json"),
        ("event/1", '{"kind": "joined", "ranks": [0, 1, 2], "reason": "", "time": 1.0}'),
    ],
)
def test_members_agree_once_more_where_another_program_has_written_into_the_store(key: str, text: str | bytes) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore(PREFIX, server).set(key, text)
    members = [Member(f"localhost:{server.port}", rank=rank, replicas=2, incarnation=0) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        agreed = list(threads.map(lambda member: member.agree({"exchanges": member.rank}), members))
    for agreement in agreed:
        assert (agreement.epoch, agreement.members) == (1, (0, 1))
        assert agreement.statuses == {0: {"exchanges": 0}, 1: {"exchanges": 1}}
    for member in members:
        member.close()


class LateWork:
    """A collective that completes between a look that times out and the question whether it has completed."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_completes_just_after_a_look_has_not_failed(member: Member) -> None:
    work = LateWork()
    member.wait(work)
    assert work.waits == 2


class WorkOfNCCL:
    """A collective by NCCL's rules: `wait` enqueues; with a timeout, which counts from the start, it may abort."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.seconds = seconds
        self.is_aborted = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        while timeout is not None and not self.is_completed():
            if time.monotonic() - self.began >= timeout.total_seconds():
                self.is_aborted = True
            time.sleep(0.001)
        if self.is_aborted:
            raise dist.DistBackendError("the communicator was aborted")
        return True

    def is_completed(self) -> bool:
        return self.is_aborted or time.monotonic() - self.began >= self.seconds


def test_a_collective_of_simulated_nccl_is_not_aborted_by_waiting_for_it(member: Member) -> None:
    member.device = torch.device("meta")
    work = WorkOfNCCL(seconds=0.5)
    member.wait(work)
    assert not work.is_aborted
    assert time.monotonic() - work.began >= 0.5, "it has completed, and was not only enqueued"


def test_a_loss_releases_a_thread_that_waits_inside_a_simulated_device(member: Member) -> None:
    member.device = torch.device("meta")
    released = threading.Event()
    member.release = released.set
    member.events.publish_next(1, "left", [1], "it was killed")
    assert released.wait(30), "by the thread that follows the events"
    with pytest.raises(MembershipChanged, match="aborted"):
        member.wait(WorkOfNCCL(seconds=0.0))  # what it left is no result


def test_a_collective_that_failed_raises_its_own_error(member: Member) -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        member.wait(LateWork("connection closed"))


def test_a_collective_of_torch_that_failed_raises_its_own_error(member: Member) -> None:
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work = groups[0].allreduce([torch.ones(2)])
    groups[1] = None  # its connections are closed
    with member.interrupting_collectives(), pytest.raises(RuntimeError, match=r"(?i)connection|peer"):
        work.wait()
    assert dist.Work.wait.__name__ == "wait", "torch's own again"


def test_the_cost_of_a_change_is_noted_for_its_epoch_and_added_up(member: Member) -> None:
    member.epoch = 3
    member.add_lost_time(0.25)
    member.epoch = 4
    member.add_lost_time(0.5)
    assert [int(member.store.get(f"cost/{epoch}")) for epoch in (3, 4)] == [250, 500]
    assert member.store.add("lost_ms", 0) == 750


def test_a_request_to_join_is_answered_once(member: Member) -> None:
    member.events.publish("left", [1], "rank 1 was killed by SIGKILL")
    member.epoch, member.members = 1, (0,)
    member.store.set("incarnation/1", "1")
    member.store.set("waiting/1", "1")
    assert member.waiting_ranks() == []
    member.store.add("asked/1", 1)
    assert member.waiting_ranks() == [1]
    member.admit([1])
    member.events.publish("left", [1], "no heartbeat from machine 1")
    member.epoch = 3
    assert member.waiting_ranks() == [], "its machine is gone, and nobody withdraws the request"
    member.store.add("asked/1", 1)
    assert member.waiting_ranks() == [1]


def test_many_members_ask_seldom_whether_a_replacement_wants_to_join(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(member, "waiting_ranks", lambda: asked.append(True) or [1])
    assert not member.sees_request(), "nobody is missing"
    member.members = (0,)
    assert member.sees_request()
    member.replicas, member.members = 10_000, tuple(range(9_992))
    assert not member.sees_request(), "all ask 80,000 times: once in 40 s"
    assert len(asked) == 1
