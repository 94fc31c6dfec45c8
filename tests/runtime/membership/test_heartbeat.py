"""What many processes ask of one store stays bounded, and everybody is watched by others."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.distributed import HashStore

from meshwright.runtime.membership import heartbeat
from meshwright.runtime.membership.heartbeat import Heartbeats, pause, watched_members


@pytest.mark.parametrize(("processes", "seconds"), [(4, 0.1), (200, 0.1), (1_250, 0.625), (10_000, 5.0)])
def test_more_processes_ask_less_often(processes: int, seconds: float) -> None:
    assert pause(0.1, processes) == seconds
    assert pause(0.1, processes, 1_000_000) == 0.1


def test_few_members_watch_all() -> None:
    assert watched_members(3, (1, 3, 4, 7)) == [1, 3, 4, 7]


@pytest.mark.parametrize("number", [65, 100, 1_250])
def test_many_members_watch_few_and_each_is_watched_by_some_of_other_machines(number: int) -> None:
    members = tuple(rank for rank in range(number + 3) if rank not in (2, 9, number))
    watched = {own: watched_members(own, members) for own in members}
    watchers = Counter(rank for others in watched.values() for rank in others)
    assert all(own in others for own, others in watched.items())
    assert set(watchers) == set(members)
    assert max(map(len, watched.values())) <= 8
    for rank in members:
        elsewhere = [own for own, others in watched.items() if rank in others and own // 8 != rank // 8]
        assert elsewhere, f"only its own machine watches rank {rank}"


def test_a_counter_that_another_program_has_overwritten_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    sender, watcher = Heartbeats(store, "heartbeat", ()), Heartbeats(store, "heartbeat", (1,))
    monkeypatch.setattr(heartbeat, "SECONDS_WITHOUT_HEARTBEAT", -1.0)
    assert watcher.silent() == [1], "nothing is there yet"
    monkeypatch.undo()
    for _ in range(2):
        sender.send(1)
        assert watcher.silent() == []
        store.set("heartbeat/1", "not a number")
        assert watcher.silent() == []
