"""Who is made to raise, and who is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from meshwright.errors import StuckError
from meshwright.watch.hangs.interrupting import Interrupter


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter(threading.current_thread())
    yield made
    made.close()


def interrupt(interrupter: Interrupter, seconds: float) -> None:
    arguments = (threading.current_thread(), "verdict")
    threading.Thread(target=interrupter.interrupt, args=arguments, kwargs={"exits_first": False}).start()
    time.sleep(seconds)


def test_a_thread_that_waits_raises(interrupter: Interrupter) -> None:
    with pytest.raises(StuckError, match="verdict"):
        interrupt(interrupter, seconds=3)
    assert not interrupter.is_exiting


def test_a_thread_that_reports_by_itself_is_not_interrupted(interrupter: Interrupter) -> None:
    interrupter.disarm()
    interrupt(interrupter, seconds=0.3)
    assert not interrupter.is_exiting


def test_nor_does_it_raise_twice(interrupter: Interrupter) -> None:
    with pytest.raises(StuckError):
        interrupt(interrupter, seconds=3)
    interrupt(interrupter, seconds=0.3)
