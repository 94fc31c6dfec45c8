"""What a process says of itself when the others ask, and what they find out about one that does not answer."""

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

from .place import BACKWARD, COLLECTIVE, DEBUGGER, FORWARD, Place, is_at_a_lock, place_of, place_of_error, signature_of
from .recorder import newest_collective

SECONDS_TO_COUNT_AS_WAITING = 1.0
_BUSY = 0.2
"""Share of one core at which a process counts as computing."""
_SECONDS_TO_MEASURE = 0.5
"""Over less time than that, looking is itself the most of what the process does."""
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine) if hasattr(os, "uname") else None


@dataclass(frozen=True)
class Report:
    """Where a process stands, and for how long."""

    rank: int
    place: Place
    still: float
    """Seconds for which its thread has not moved on."""
    idle: float
    """Seconds for which, in addition, neither it nor a child of it computed anything."""
    at_a_lock: bool = False
    """It asks for a lock, and nothing in the process looks as if it would give it one."""
    lost: bool = False
    """Its call failed because another process had closed the connection."""
    spins: bool = False
    """Its backend may wait by asking again and again, as NCCL's does: that it computes says nothing."""
    begun: int = 0
    """Collectives begun so far, in all process groups."""
    in_parts: bool = False
    """There are process groups of some of the ranks: a pass through the model may wait for those only."""
    recorded: str = ""
    """The newest collective in torch's flight recorder that has not completed, where the recorder is on."""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks: in a collective, or in a pass that computes nothing."""
        if self.lost:
            return True
        if self.still < SECONDS_TO_COUNT_AS_WAITING:
            return False
        if self.in_a_pass:
            return self.spins or self.idle >= SECONDS_TO_COUNT_AS_WAITING
        return self.place.phase == COLLECTIVE

    @property
    def is_of_a_wait(self) -> bool:
        """Whether it says that the thread waits, for ranks or at a lock: no longer true once the thread moves."""
        return not self.lost and (self.waits or self.at_a_lock)

    @property
    def in_a_pass(self) -> bool:
        """Whether it is in a forward or backward pass, whose collectives start below Python."""
        return self.place.phase in (BACKWARD, FORWARD)

    @property
    def is_debugged(self) -> bool:
        """Whether somebody looks at it in a debugger."""
        return self.place.phase == DEBUGGER

    def to_json(self) -> str:
        """Write it down for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read what another process wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "place": Place(**fields["place"])})


class Observer:
    """Look at one thread again and again, and know since when it stands where it stands."""

    def __init__(self, rank: int, thread: threading.Thread) -> None:
        self.rank = rank
        self._made_by = thread
        self._signature: Any = None
        self._moved = self._worked = self._looked = time.monotonic()
        self._cpu = time.process_time()
        self.lost_by: BaseException | None = None
        """The error of a call that failed because a peer was gone."""

    @property
    def thread(self) -> threading.Thread:
        """The thread that trains: it made the Accelerator; once that has ended, the main thread."""
        return self._made_by if self._made_by.is_alive() else threading.main_thread()

    def look(self) -> float:
        """Look once; return for how many seconds the thread has not moved."""
        now, cpu = time.monotonic(), time.process_time()
        signature = signature_of(self.thread.ident or 0), _begun()
        if signature != self._signature:
            self._signature, self._moved, self._worked = signature, now, now
        if now - self._looked >= _SECONDS_TO_MEASURE:
            if cpu - self._cpu > _BUSY * (now - self._looked):
                self._worked = now
            self._looked, self._cpu = now, cpu
        return now - self._moved

    def has_moved(self) -> bool:
        """Look again; tell whether the thread has run on since the last look."""
        before = self._signature
        self.look()
        return bool(before != self._signature)

    def waits(self) -> bool:
        """Tell whether the thread is in something that other ranks must take part in."""
        place = place_of(self.thread.ident or 0)
        return place is not None and self._report(place, lost=False).waits

    def report(self) -> Report:
        """Say where the thread stands now."""
        error = self.lost_by  # once: the thread may set it while it is being looked at
        lost = error is not None
        place = place_of_error(error) if error is not None else place_of(self.thread.ident or 0)
        place = place or Place(phase="the end of the script")
        report = self._report(place, lost)
        if report.at_a_lock and _children_compute():
            self._worked = time.monotonic()
            report = self._report(place, lost)
        return replace(report, recorded=newest_collective())

    def _report(self, place: Place, lost: bool) -> Report:
        now = time.monotonic()
        return Report(
            rank=self.rank,
            place=place,
            still=now - self._moved,
            idle=now - self._worked,
            at_a_lock=place.at_a_lock and _sleeps_at_locks(self.thread),
            lost=lost,
            spins=_spins(),
            begun=_begun(),
            in_parts=len({group.size() for group in _groups()}) > 1,
        )


def _groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [group for group in list(dist.distributed_c10d._world.pg_map) if hasattr(group, "size")]


def _begun() -> int:
    """Count the collectives begun so far, where the backend counts them."""
    total = 0
    for group in _groups():
        try:
            total += int(group._get_sequence_number_for_group())
        except (AttributeError, RuntimeError):  # a torch or a backend without it, or a group that is being closed
            continue
    return total


def _spins() -> bool:
    try:
        return str(dist.get_backend()) != "gloo"
    except (ValueError, RuntimeError):  # closed just now
        return False


def _sleeps_at_locks(thread: threading.Thread) -> bool:
    """Tell whether a thread sleeps at a lock, and so does every other that could give it free.

    One that reads, writes or sleeps may come back: an upload, a download, a timer; so may one in a library's own code,
    whose threads Python does not know. False where it cannot be seen.
    """
    others = [t for t in threading.enumerate() if t not in (thread, threading.current_thread())]
    return all(is_at_a_lock(each.ident or 0) and _sleeps(each) for each in (thread, *others))


def _sleeps(thread: threading.Thread) -> bool:
    # In a forked process Python may still know the main thread by the number it had in the parent.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        return _FUTEX is not None and Path(f"/proc/self/task/{number}/syscall").read_text().split()[0] == _FUTEX
    except (OSError, IndexError):
        return False


def _children_compute(seconds: float = 0.3) -> bool:
    """Tell whether a child of this process computes: data workers, a pool that tokenises."""

    def spent() -> float:
        total = 0.0
        try:
            for child in psutil.Process().children(recursive=True):
                times = child.cpu_times()
                total += times.user + times.system
        except psutil.Error:  # one has ended just now: something goes on
            return float("inf")
        return total

    before = spent()
    time.sleep(seconds)
    return not spent() - before <= _BUSY * seconds  # also where one of them is infinite


def state_of_process(host: str, pid: int) -> str:
    """Say how a process is that does not answer, as far as can be seen from here."""
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
    return f"is alive, but no Python runs in it (process {pid}: a native call holds the interpreter)"


def listed(ranks: Iterable[int]) -> str:
    """Write ranks as people do: "Rank 3", "Ranks 0, 2-5"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'Rank' if len(ordered) == 1 else 'Ranks'} {shown or 'none'}"
