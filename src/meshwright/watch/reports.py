"""Report the state of this process to the other ranks, and inspect a process that does not answer."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from ..errors import InvalidDataError
from ..untrusted import build, parse_json
from .place import BACKWARD, COLLECTIVE, DEBUGGER, FORWARD, Place, is_at_lock, place_of, place_of_error, signature_of
from .recorder import Outstanding, outstanding_collectives

SECONDS_TO_COUNT_AS_WAITING = 1.0
_BUSY = 0.2
"""Share of one core at which a process counts as computing."""
_SECONDS_TO_MEASURE = 0.5
"""Over a shorter time the measurement itself dominates."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine) if hasattr(os, "uname") else None


@dataclass(frozen=True)
class ProcessReport:
    """Where a process is, and for how long."""

    rank: int
    place: Place
    stalled_seconds: float
    """Seconds for which the training thread has made no progress."""
    idle_seconds: float
    """Seconds for which, in addition, neither the process nor a child of it used the CPU."""
    at_lock: bool = False
    """Whether it acquires a lock that no other thread of the process seems able to release."""
    lost_peer: bool = False
    """Whether its call failed because another process closed the connection."""
    is_async: bool = False
    """Whether collectives complete on the device, as NCCL's do: the host is not in the call that it waits for."""
    outstanding: str | None = None
    """The group and the number of the oldest collective that has not completed on such a device."""
    collectives_started: int = 0
    """Number of collectives started so far, in all process groups."""
    has_subgroups: bool = False
    """Whether there are process groups smaller than the world; a pass of the model may wait for one of those only."""
    flight_record: str = ""
    """The newest incomplete collective in torch's flight recorder, where the recorder is enabled."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks: in a collective, or in a pass that computes nothing.

        Where collectives are asynchronous, only one that has not completed says so. A host that stands still may
        compile, and one that moves on may have started more of them behind it.
        """
        if self.lost_peer:
            return True
        if self.stalled_seconds < SECONDS_TO_COUNT_AS_WAITING:
            return False
        if self.outstanding is not None:
            return True
        if self.in_pass:
            return not self.is_async and self.idle_seconds >= SECONDS_TO_COUNT_AS_WAITING
        return self.place.phase == COLLECTIVE

    @property
    def is_blocked(self) -> bool:
        """Whether the thread waits for ranks or at a lock. The report is outdated once the thread moves."""
        return not self.lost_peer and (self.is_waiting or self.at_lock)

    @property
    def in_pass(self) -> bool:
        """Whether it is in a forward or backward pass, and it is unknown which collective of it it waits for."""
        return self.place.phase in (BACKWARD, FORWARD) and self.outstanding is None

    @property
    def in_debugger(self) -> bool:
        """Whether it is stopped in a debugger."""
        return self.place.phase == DEBUGGER

    def to_json(self) -> str:
        """Serialize for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes, rank: int) -> ProcessReport:
        """Read the report of another process; raise InvalidDataError unless it is of that rank."""
        what = f"the report of rank {rank}"
        report = build(cls, parse_json(text, what), what)
        if report.rank != rank:
            raise InvalidDataError(f"{what} says that it is of rank {report.rank}")
        return report


class Observer:
    """Sample the training thread, and track since when it has made no progress."""

    def __init__(self, rank: int, thread: threading.Thread) -> None:
        self.rank = rank
        self._creator = thread
        self._signature: Any = None
        self._host_signature: Any = None
        self._last_progress = self._last_busy = self._last_measured = time.monotonic()
        self._cpu_seconds = time.process_time()
        self.lost_peer_error: BaseException | None = None
        """The error of a call that failed because a peer closed the connection."""

    @property
    def thread(self) -> threading.Thread:
        """The training thread: the one that created the Accelerator, or the main thread once that has ended."""
        return self._creator if self._creator.is_alive() else threading.main_thread()

    def sample(self) -> float:
        """Sample the thread once; return for how many seconds it has made no progress."""
        now, cpu_seconds = time.monotonic(), time.process_time()
        signature: Any = signature_of(self.thread.ident or 0), _collectives_started()
        self._host_signature, stands_still = signature, signature == self._host_signature
        # A host that moves is healthy. Reading the recorder queries events of the device, which a capture of a CUDA
        # graph does not survive; whoever captures moves.
        if stands_still and (oldest := _oldest_outstanding(with_frames=False)) is not None:
            signature = oldest.key
        if signature != self._signature:
            self._signature, self._last_progress, self._last_busy = signature, now, now
        if now - self._last_measured >= _SECONDS_TO_MEASURE:
            if cpu_seconds - self._cpu_seconds > _BUSY * (now - self._last_measured):
                self._last_busy = now
            self._last_measured, self._cpu_seconds = now, cpu_seconds
        return now - self._last_progress

    def has_progressed(self) -> bool:
        """Sample again; return whether the thread has made progress since the last sample."""
        before = self._signature
        self.sample()
        return bool(before != self._signature)

    def is_waiting(self) -> bool:
        """Return whether the thread is in a call that other ranks must take part in."""
        place = place_of(self.thread.ident or 0)
        return place is not None and self._report(place, lost_peer=False).is_waiting

    def report(self) -> ProcessReport:
        """Return where the thread is now."""
        error = self.lost_peer_error  # read once: the thread may set it meanwhile
        lost_peer = error is not None
        place = place_of_error(error) if error is not None else place_of(self.thread.ident or 0)
        place = place or Place(phase="the end of the script")
        report = self._report(place, lost_peer)
        if report.at_lock and _children_compute():
            self._last_busy = time.monotonic()
            report = self._report(place, lost_peer)
        recorded = outstanding_collectives()
        return replace(report, flight_record=recorded[-1].describe() if recorded else "")

    def _report(self, place: Place, lost_peer: bool) -> ProcessReport:
        now = time.monotonic()
        oldest = _oldest_outstanding()
        return ProcessReport(
            rank=self.rank,
            place=place if oldest is None or lost_peer else _place_of(oldest, place),
            stalled_seconds=now - self._last_progress,
            idle_seconds=now - self._last_busy,
            at_lock=place.at_lock and _all_sleep_at_locks(self.thread),
            lost_peer=lost_peer,
            is_async=_backend_is_async(),
            outstanding=None if oldest is None else oldest.key,
            collectives_started=_collectives_started(),
            has_subgroups=len({group.size() for group in _groups()}) > 1,
        )


def _groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [group for group in list(dist.distributed_c10d._world.pg_map) if hasattr(group, "size")]


def _collectives_started() -> int:
    """Count the collectives started so far, where the backend counts them."""
    total = 0
    for group in _groups():
        try:
            total += int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a torch or a backend without it, or a group that is being destroyed
            continue
    return total


def _oldest_outstanding(*, with_frames: bool = True) -> Outstanding | None:
    """Return the collective that the device waits in, where collectives are asynchronous.

    Gloo beside them numbers its own in the same group: such a number must not be compared with those of the device.
    """
    if not _backend_is_async():
        return None
    recorded = outstanding_collectives(with_frames=with_frames)
    return next((each for each in recorded if not each.is_of_gloo), None)


def _place_of(oldest: Outstanding, host: Place) -> Place:
    """Return where a collective was started.

    The backward pass starts its collectives in a thread of autograd, where there is no line of the script. Then it is
    where the host is, which may have left the pass: the function and the condition there have not started it.
    """
    started = oldest.place()
    if started is not None:
        is_still_there = (started.file, started.line) == (host.file, host.line)
        return replace(started, handling=host.handling if is_still_there else "")
    here = replace(host, operation=oldest.operation(), group_ranks=oldest.ranks())
    return here if host.phase == BACKWARD else replace(here, phase=BACKWARD, call="", guard="")


def _backend_is_async() -> bool:
    world = dist.group.WORLD
    backends = "" if world is None else dist.distributed_c10d._world.pg_backend_config.get(world, "")
    return any(not part.endswith(":gloo") for part in str(backends).split(",") if part)  # "cpu:gloo,cuda:nccl"


def _all_sleep_at_locks(thread: threading.Thread) -> bool:
    """Return whether a thread sleeps at a lock, and so does every other thread that could release it.

    A thread in I/O or a sleep may return: an upload, a download, a timer. So may one in native code, whose threads
    Python does not know. The result is False where the state of threads cannot be read.
    """
    others = [t for t in threading.enumerate() if t not in (thread, threading.current_thread())]
    return all(is_at_lock(each.ident or 0) and _sleeps(each) for each in (thread, *others))


def _sleeps(thread: threading.Thread) -> bool:
    # In a forked process Python may still hold the thread id that the main thread had in the parent.
    thread_id = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        return _FUTEX is not None and Path(f"/proc/self/task/{thread_id}/syscall").read_text().split()[0] == _FUTEX
    except (OSError, IndexError):
        return False


def _children_compute(seconds: float = 0.3) -> bool:
    """Return whether a child of this process uses the CPU: data workers, a pool of tokenizers."""

    def cpu_seconds() -> float:
        total = 0.0
        try:
            for child in psutil.Process().children(recursive=True):
                times = child.cpu_times()
                total += times.user + times.system
        except psutil.Error:  # a child has just ended: something is running
            return float("inf")
        return total

    before = cpu_seconds()
    time.sleep(seconds)
    return not cpu_seconds() - before <= _BUSY * seconds  # also where one of them is infinite


def state_of_process(host: str, pid: int) -> str:
    """Describe the state of a process that does not answer, as far as this host can tell."""
    if host != socket.gethostname():
        return f"does not answer (process {pid} on {host})"
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return f"is dead (process {pid})"
    except psutil.Error:
        return f"does not answer (process {pid})"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return f"is dead (process {pid})"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"is stopped (process {pid}: SIGSTOP or a debugger; `kill -CONT {pid}` lets it go on)"
    return (
        f"is alive, but no Python runs in it (process {pid}: a native call holds the interpreter, or no core is free)"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as a short list: "Rank 3", "Ranks 0, 2-5"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'Rank' if len(ordered) == 1 else 'Ranks'} {shown or 'none'}"
