"""Run a script on forked ranks, which start in a moment because the parent has torch imported."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.group.network import loopback
from .verdict import LOST_PEER_ERRORS
from .worker import run_file, run_module, without_launcher_frames

_SECONDS_FOR_OTHERS = 10.0
"""How long the other ranks may go on after one has failed."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What is run, and with which variables."""

    script: Sequence[str]
    as_module: bool
    processes: int
    port: int
    variables: Mapping[str, str]
    folder: Path
    """For the output of each rank: `rank_N.log`."""
    number: str | None = None
    """A variable for the number of each process, where the processes are no ranks of one group."""
    before: Callable[[], object]
    """Called on every rank before the script."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first rank that did not end well."""

    rank: int
    reason: str
    log: str


def run_forked(world: World, seconds: float) -> Failure | None:
    """Run a script on forked ranks, and return the first failure. The parent must not have started threads."""
    world.folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    logs = [_open_log(world, rank) for rank in range(world.processes)]  # before a rank can remove the folder
    running = {_fork(world, rank, log): rank for rank, log in enumerate(logs)}
    failures: list[Failure] = []
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        for pid, rank in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            reason = _reason(os.waitstatus_to_exitcode(status))
            if reason:
                failures.append(Failure(rank=rank, reason=reason, log=_log(world, rank)))
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHERS)
        time.sleep(0.02)
    for pid in running:
        _kill(pid)
    if failures:  # a rank that only lost its peer may end before the one that failed
        return min(failures, key=lambda failure: LOST_PEER_ERRORS.search(failure.log) is not None)
    if running:
        rank = min(running.values())
        return Failure(rank=rank, reason=f"had not ended after {seconds:.0f} s", log=_log(world, rank))
    return None


def run_several(worlds: Sequence[World], seconds: float, at_once: int) -> list[Failure | None]:
    """Run worlds of one process each, some at once, and return the failure of each. No threads, as above."""
    results: list[Failure | None] = [None] * len(worlds)
    waiting, running = list(range(len(worlds)))[::-1], dict[int, tuple[int, float]]()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index = waiting.pop()
                worlds[index].folder.mkdir(parents=True, exist_ok=True)
                running[_fork(worlds[index], 0, _open_log(worlds[index], 0))] = index, time.monotonic() + seconds
            for pid, (index, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() < deadline:
                    continue
                del running[pid]
                if not ended:
                    _kill(pid)
                reason = _reason(os.waitstatus_to_exitcode(status)) if ended else f"had not ended after {seconds:.0f} s"
                if reason:
                    results[index] = Failure(rank=0, reason=reason, log=_log(worlds[index], 0))
            time.sleep(0.02)
    finally:
        for pid in running:  # Ctrl-C
            _kill(pid)
    return results


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _reason(code: int) -> str:
    return "" if code == 0 else f"ended with exit code {code}"


def _log(world: World, rank: int) -> str:
    """Return what a rank has printed; nothing where it ended before it could, or the script removed the folder."""
    log = world.folder / f"rank_{rank}.log"
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _open_log(world: World, rank: int) -> int:
    return os.open(world.folder / f"rank_{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)


def _fork(world: World, rank: int, log: int) -> int:
    pid = os.fork()
    if pid:
        os.close(log)
        return pid
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(world.variables)
        if world.number is not None:
            os.environ[world.number] = str(rank)
        elif world.processes > 1:
            os.environ.update(_rank_variables(world, rank))
        code = _run(world)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank_variables(world: World, rank: int) -> dict[str, str]:
    size = str(world.processes)
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": loopback(), "MASTER_PORT": str(world.port)}  # fmt: skip


def _run(world: World) -> int:
    sys.argv = list(world.script)
    try:
        world.before()
        run_module(sys.argv[0]) if world.as_module else run_file(sys.argv[0])
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if code:
            return code
    except BaseException as error:
        error.__traceback__ = without_launcher_frames(error.__traceback__)
        traceback.print_exception(error)
        return 1
    atexit._run_exitfuncs()
    return 0
