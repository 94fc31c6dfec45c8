"""One watcher per open group, and no trace of it afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch.distributed as dist

from meshwright import Accelerator, PartialState
from meshwright.watch.hangs.verdict import HangVerdict
from meshwright.watch.hangs.watcher import Watcher
from meshwright.watch.place import COLLECTIVE, USER_CODE, Place
from meshwright.watch.reports import ProcessReport
from tests.ranks import ranks
from tests.timing import limit


def watchers() -> int:
    return sum(thread.name == "meshwright watcher" for thread in threading.enumerate())


@ranks(2)
def test_a_group_has_one_watcher_as_long_as_it_is_open() -> None:
    accelerator = Accelerator(cpu=True)
    PartialState()
    assert watchers() == 1
    PartialState._reset_state()  # the group stays open
    assert watchers() == 1
    accelerator = Accelerator(cpu=True)
    assert watchers() == 1
    accelerator.end_training()
    assert watchers() == 0
    assert not dist.is_initialized()


@ranks(2)
def test_what_belongs_to_the_program_is_given_back() -> None:
    def own(number: int, frame: object) -> None:
        """Handle a signal of the user's."""

    taken = signal.SIGRTMIN + 7
    signal.signal(taken, own)
    numbers = range(taken, signal.SIGRTMAX)
    handlers = [signal.getsignal(number) for number in numbers]
    exit_before = sys.exit
    try:
        accelerator = Accelerator(cpu=True)
        assert signal.getsignal(taken) is own
        accelerator.end_training()
        assert sys.exit is exit_before
        assert "meshwright" not in getattr(sys.excepthook, "__module__", "")  # torch leaves one of its own
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        signal.signal(taken, signal.SIG_DFL)


@ranks(2)
def test_a_forked_child_leaves_the_watcher_alone() -> None:
    accelerator = Accelerator(cpu=True)
    child = os.fork()
    if child == 0:
        from meshwright import watch

        assert watch._running is not None
        watch._running.stop()  # as the exit functions do
        if watch._running._stopped:
            os._exit(3)
        PartialState()  # as a data worker may
        os._exit(4 if watchers() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watchers() == 1
    accelerator.wait_for_everyone()
    accelerator.end_training()


@ranks(2)
def test_a_group_that_its_user_closes() -> None:
    Accelerator(cpu=True)
    dist.destroy_process_group()
    PartialState._reset_state()
    from meshwright import watch

    assert watch._running is not None
    watch._running._thread.join(10)
    assert watchers() == 0


@ranks(2)
def test_a_notice_comes_again_after_twice_the_time() -> None:
    accelerator = Accelerator(cpu=True)
    watcher = Watcher(dist.HashStore(), accelerator.process_index, 2, 3.0, accelerator.device)
    own = ProcessReport(rank=0, place=Place(phase=COLLECTIVE), stalled_seconds=3, idle_seconds=3)
    for expected in (6.0, 12.0, 24.0):
        watcher._act(HangVerdict(fatal=False, culprits=[1], text="Rank 1 is busy."), own)
        assert watcher._alarm_after == expected
    watcher._interrupter.close()
    accelerator.end_training()


@ranks(2)
def test_a_rank_that_lost_its_peer_gets_a_verdict_that_knows_it() -> None:
    accelerator = Accelerator(cpu=True)
    watcher = Watcher(dist.HashStore(), accelerator.process_index, 2, 3.0, accelerator.device)
    watcher._observer.lost_peer_error = RuntimeError("Connection closed by peer")
    before = ProcessReport(rank=0, place=Place(phase=USER_CODE), stalled_seconds=0, idle_seconds=0)
    knowing = ProcessReport(rank=0, place=Place(phase=COLLECTIVE), stalled_seconds=0, idle_seconds=0, lost_peer=True)
    watcher._act(HangVerdict(fatal=False, culprits=[0], text="", recheck_in=1.0), before)
    watcher._act(HangVerdict(fatal=False, culprits=[0], text="Rank 0 is busy."), before)
    watcher._act(HangVerdict(fatal=False, culprits=[], text="", recheck_in=1.0), knowing)
    assert watcher._verdicts.empty()
    assert not watcher._stopping.is_set()
    watcher._act(HangVerdict(fatal=True, culprits=[1], text="Rank 1 has left."), before)
    watcher._act(HangVerdict(fatal=False, culprits=[1], text="Rank 1 is stopped."), knowing)
    assert [watcher._verdicts.get(timeout=limit(5)).text for _ in range(2)] == [
        "Rank 1 has left.",
        "Rank 1 is stopped.",
    ]
    assert watcher._stopping.is_set()
    watcher._interrupter.close()
    accelerator.end_training()
