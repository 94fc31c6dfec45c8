"""A process in the place of one that ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from meshwright.launch.processes.elastic.replacement import LocalReplica, wait_for_end
from meshwright.launch.processes.verdict import Ending
from tests.timing import limit


def test_waiting_ends_with_the_first_process_that_ends_or_in_time() -> None:
    long, short = (subprocess.Popen(["sleep", seconds]) for seconds in ("600", "0.2"))
    try:
        started = time.monotonic()
        wait_for_end([long.pid, short.pid], 60)
        assert time.monotonic() - started < limit(2)
        assert (long.poll(), short.wait()) == (None, 0)
        started = time.monotonic()
        wait_for_end([long.pid], 0.2)
        assert 0.15 < time.monotonic() - started < limit(2)
    finally:
        long.kill()
        long.wait()


def test_a_replica_keeps_why_it_was_replaced_until_it_has_joined() -> None:
    replica = LocalReplica(rank=5, folder=Path("logs/1"))
    killed = Ending(rank=5, local_rank=1, exit_code=-9)
    replica.leave(killed)
    assert (replica.incarnation, replica.is_member, replica.previous) == (1, False, killed)
    assert replica.folder_now == Path("logs/1/replacement_1")
    replica.failures = 2
    replica.join()
    assert (replica.incarnation, replica.is_member, replica.previous, replica.failures) == (1, True, None, 0)
