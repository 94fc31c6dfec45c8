"""What a process says of itself is of one moment."""

from __future__ import annotations

import threading

import pytest

from meshwright.watch import reports
from meshwright.watch.place import Place, place_of
from meshwright.watch.reports import Observer


def test_a_peer_that_is_lost_while_the_thread_is_looked_at_is_for_the_next_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observer = Observer(3, threading.current_thread())
    error = RuntimeError("Connection closed by peer")

    def look_and_lose(thread: int) -> Place | None:
        place = place_of(thread)
        observer.lost_peer_error = error
        return place

    monkeypatch.setattr(reports, "place_of", look_and_lose)
    during, after = observer.report(), observer.report()
    assert not during.lost_peer
    assert not during.is_waiting
    assert during.place.source == "place = place_of(thread)"
    assert after.lost_peer
    assert after.is_waiting
