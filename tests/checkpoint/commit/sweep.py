"""Kill a save at one file-system call after the other, and look at what is left each time.

    echo '{"folder": "/tmp/x", "world_size": 2, "victim": 1, "by": "strace", "points": 8}' |
        python -m tests.checkpoint.commit.sweep /tmp/warm

torch is imported once; every attempt is a fork. The victim is killed by strace as it enters one of its system calls on
files, in whichever thread (`by="strace"`), or by itself before a call on files that Python makes (`by="python"`, which
needs no tool). Then fresh processes load what there is, and save again. Each attempt is printed as a line of JSON, and
an empty line ends a sweep.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.commit import supplements
from tests.ranks.pool import free_port
from tests.ranks.worker import forget_everything

from ..runs import StampedRun

OLD, NEW, NEXT = 1, 2, 3
SECONDS_TO_END = 60.0
_CALLS = (
    "%file,write,writev,pwrite64,pwritev,fsync,fdatasync,sync_file_range,ftruncate,fallocate,close,"
    "getdents64,sendfile,copy_file_range"
)
_CHANGES_NAMES = (
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "rmdir",
    "link",
    "linkat",
)


@dataclass(kw_only=True)
class Sweep:
    """What is swept."""

    folder: str
    world_size: int = 1
    victim: int = 0
    by: str = "strace"
    explicit: bool = False
    """Overwrite one named folder, instead of automatic names with `total_limit=1`."""
    resumes: bool = False
    """The victim loads first: it meets what an earlier kill left."""
    wait: bool = True
    points: int | None = None
    """How many calls to take, half of them calls that change names; None takes every one."""
    begin_with: str | None = None
    """A project to begin with, instead of one with a committed checkpoint."""
    keep_remains: str | None = None
    """Where to keep one example of every kind of remains."""


@dataclass(kw_only=True)
class Attempt:
    """One kill and what came of it."""

    call: str
    killed: bool = False
    left: list[str] = field(default_factory=list)
    loaded: int | None = None
    left_after_next_save: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    """What the other ranks ended with."""
    problem: str | None = None


# --- what the processes do --------------------------------------------------------------------------------------------


def begin(sweep: Sweep, project: str) -> StampedRun:
    return StampedRun(None if sweep.explicit else project)


def place(sweep: Sweep, project: str) -> str | None:
    return f"{project}/ckpt" if sweep.explicit else None


def save_first(sweep: Sweep, project: str) -> None:
    run = begin(sweep, project)
    run.stamp(OLD)
    run.accelerator.save_state(place(sweep, project))


def save_and_be_killed(sweep: Sweep, project: str, armed: Callable[[], None]) -> None:
    run = begin(sweep, project)
    run.stamp(NEW)
    armed()
    if sweep.resumes:
        run.accelerator.load_state(place(sweep, project))
        run.stamp(NEW)
    run.accelerator.save_state(place(sweep, project), wait=sweep.wait)
    if not sweep.wait:
        run.accelerator.checkpointer.wait()


def load(sweep: Sweep, project: str) -> int:
    run = begin(sweep, project)
    report = run.accelerator.load_state(place(sweep, project), verify="hash")
    # A rank that was killed before it added its generators gets others, and the report says so.
    derived = run.accelerator.process_index > 0 and any("generators there were derived" in it for it in report.changes)
    return run.stamp_of_all(but=["generator"] if derived else [])


def save_again(sweep: Sweep, project: str) -> None:
    run = begin(sweep, project)
    run.stamp(NEXT)
    run.accelerator.save_state(place(sweep, project))


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass
class Child:
    """A forked process that reports one result at its end."""

    pid: int
    answer: int

    def wait(self, deadline: float) -> int | None:
        """Return its status, or None after ending it because it hung."""
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return None

    def result(self) -> Any:
        with os.fdopen(self.answer, encoding="utf-8") as stream:
            text = stream.read()
        return json.loads(text) if text else None


def fork(function: Callable[[], Any], environment: dict[str, str]) -> Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader)
    try:
        os.environ.update(environment)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        answer = {"value": function()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def fork_world(world_size: int, functions: list[Callable[[], Any]]) -> list[Child]:
    port = str(free_port())
    world = []
    for rank, function in enumerate(functions):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world.append(fork(function, environment if world_size > 1 else {}))
    return world


def run_world(world_size: int, function: Callable[[], Any]) -> list[Any]:
    world = fork_world(world_size, [function] * world_size)
    deadline = time.monotonic() + SECONDS_TO_END
    statuses = [child.wait(deadline) for child in world]
    answers = [child.result() for child in world]
    for rank, (status, answer) in enumerate(zip(statuses, answers, strict=True)):
        if status is None:
            raise RuntimeError(f"rank {rank} hung")
        if answer is None or "error" in answer:
            raise RuntimeError(f"rank {rank}: {(answer or {}).get('error', f'ended with {status}')}")
    return [answer["value"] for answer in answers]


# --- killing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The n-th call of its name in one thread (strace), or the n-th of all (Python)."""

    name: str
    number: int
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.shown}".strip()


class Trigger:
    """Where the victim stops until the parent is ready, and what counts its calls then."""

    def __init__(self, call: Call | None, counts_itself: bool) -> None:
        self.call, self.counts_itself = call, counts_itself
        self.ready, self._tell_ready = os.pipe()
        self._wait_go, self.go = os.pipe()

    def in_victim(self) -> None:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: strace is no parent of ours
        os.write(self._tell_ready, b"!")
        os.read(self._wait_go, 1)
        if self.counts_itself:
            _count_calls_of_python(self.call)

    def close(self) -> None:
        for descriptor in (self.ready, self._tell_ready, self._wait_go, self.go):
            os.close(descriptor)


_called: list[str] = []


def _count_calls_of_python(deadly: Call | None) -> None:
    def called(name: str) -> None:
        _called.append(name)
        if deadly is not None and len(_called) == deadly.number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audited(event: str, _: Any) -> None:
        if event == "open" or event.startswith(("os.", "shutil.")):
            called(event.removeprefix("os."))

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called(name)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "close", "stat", "fstat", "lstat"):
        setattr(os, name, counted(name, getattr(os, name)))
    sys.addaudithook(audited)


class Strace:
    """strace, attached to a victim: it kills, or only writes down."""

    def __init__(self, pid: int, call: Call | None, log: Path) -> None:
        self.log = log
        command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={_CALLS}", "-p", str(pid)]
        if call is not None:
            command += ["-e", f"inject={call.name}:signal=SIGKILL:when={call.number}"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 20
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                assert self.process.stderr is not None
                raise RuntimeError(f"strace could not attach: {self.process.stderr.read().decode()}")
            time.sleep(0.002)
        time.sleep(0.01)  # the other threads

    def end(self) -> None:
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def calls(self) -> list[Call]:
        """Return the calls of all threads: strace counts each name in each thread."""
        counts: dict[tuple[str, str], int] = {}
        calls: dict[Call, None] = {}
        for line in self.log.read_text(errors="replace").splitlines():
            found = re.match(r"^(\d+) +(\w+)\((.*)", line)
            if found is not None:
                thread, name, shown = found.groups()
                counts[thread, name] = counts.get((thread, name), 0) + 1
                calls.setdefault(Call(name, counts[thread, name], shown[:100]))
        return list(calls)


def attempt_save(sweep: Sweep, project: str, call: Call | None) -> tuple[Attempt, list[Call]]:
    """Let a world save, and its victim die at a call; without one, only write the calls down."""
    attempt = Attempt(call=str(call or ""))
    trigger = Trigger(call, counts_itself=sweep.by == "python")

    def victim() -> list[str]:
        save_and_be_killed(sweep, project, trigger.in_victim)
        return list(_called)

    def other() -> None:
        save_and_be_killed(sweep, project, lambda: None)

    ranks = [victim if rank == sweep.victim else other for rank in range(sweep.world_size)]
    world = fork_world(sweep.world_size, ranks)
    os.read(trigger.ready, 1)
    strace = None
    if sweep.by == "strace":
        strace = Strace(world[sweep.victim].pid, call, Path(sweep.folder) / "strace.log")
    os.write(trigger.go, b"!")
    deadline = time.monotonic() + SECONDS_TO_END
    statuses = [child.wait(deadline) for child in world]
    trigger.close()
    answers = [child.result() for child in world]
    calls: list[Call] = []
    if strace is not None:
        strace.end()
        calls = strace.calls()
    elif call is None:
        calls = [Call(name, number) for number, name in enumerate(answers[sweep.victim]["value"], 1)]
    attempt.killed = statuses[sweep.victim] == signal.SIGKILL
    for rank, status in enumerate(statuses):
        if status is None:
            attempt.problem = f"rank {rank} hung"
        elif rank != sweep.victim:
            attempt.survivors.append(str((answers[rank] or {}).get("error", "")).strip().rpartition("\n")[2])
        elif "error" in (answers[rank] or {}):
            attempt.problem = f"the victim failed before it was killed: {answers[rank]}"
    return attempt, calls


def check_remains(sweep: Sweep, project: str, attempt: Attempt) -> None:
    parent = Path(project) if sweep.explicit else Path(project, "checkpoints")
    attempt.left = sorted(path.name for path in parent.iterdir())
    if sweep.keep_remains is not None:
        kept = Path(sweep.keep_remains, ",".join(sorted(_kind(path) for path in parent.iterdir())))
        if not kept.exists():
            shutil.copytree(project, kept)
    try:
        loaded = set(run_world(sweep.world_size, lambda: load(sweep, project)))
        run_world(sweep.world_size, lambda: save_again(sweep, project))
    except Exception as error:
        attempt.problem = str(error)
        return
    attempt.left_after_next_save = sorted(path.name for path in parent.iterdir())
    if len(loaded) != 1:
        attempt.problem = f"the ranks loaded different checkpoints: {loaded}"
    attempt.loaded = loaded.pop()
    if not attempt.killed and attempt.loaded != NEW:
        attempt.problem = "the save was not killed, and an older checkpoint was loaded"


def _kind(path: Path) -> str:
    return re.sub(r"-[0-9a-f]{8}$", "", path.name) + "+" * (path / "commit.json").exists()


def choose(calls: list[Call], points: int | None) -> list[Call]:
    """Return the calls to be killed at: half of them change names, the rest are an even sample, and the last."""
    if points is None:
        return calls
    naming = [call for call in calls if call.name in _CHANGES_NAMES]
    chosen = dict.fromkeys(naming[:: max(1, len(naming) * 2 // points)])
    chosen |= dict.fromkeys(calls[1 :: max(1, len(calls) // max(1, points - len(chosen)))])
    return list(chosen | dict.fromkeys(calls[-1:]))


def import_everything(folder: Path) -> None:
    """Save and load once, so that no fork has to import anything."""
    run = StampedRun(folder / "warm")
    run.stamp(OLD)
    run.accelerator.save_state()
    run.accelerator.load_state()
    forget_everything()
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > 1:  # a joined thread stays on this list for a moment
        assert time.monotonic() < until, "a process with threads cannot be forked"
        time.sleep(0.01)


def run(sweep: Sweep) -> None:
    folder = Path(sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    template = sweep.begin_with or str(folder / "template")
    if sweep.begin_with is None:
        run_world(sweep.world_size, lambda: save_first(sweep, template))

    def attempt_with(call: Call | None) -> list[Call]:
        project = folder / "project"
        shutil.copytree(template, project)
        attempt, calls = attempt_save(sweep, str(project), call)
        check_remains(sweep, str(project), attempt)
        print(json.dumps(asdict(attempt)))
        shutil.rmtree(project)
        return calls

    for call in choose(attempt_with(None), sweep.points):
        attempt_with(call)


def main(folder: str) -> None:
    """Do the sweeps that are asked for, until there are no more."""
    supplements.SECONDS_TO_ADD = 1.0  # rank 0 waits that long for the files of a rank that was killed
    import_everything(Path(folder))
    for line in sys.stdin:
        run(Sweep(**json.loads(line)))
        print(flush=True)


if __name__ == "__main__":
    from tests.checkpoint.commit import sweep as this

    this.main(sys.argv[1])
