"""The parent's side: keep workers warm, hand them jobs, collect or explain what happens."""

from __future__ import annotations

import functools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from tests import warm

from .worker import Job, Outcome

REPOSITORY = Path(__file__).parents[2]
SECONDS_TO_FOLLOW_A_FAILURE = 5.0
MOST_THREADS = 32
"""torch's DTensor caches keep a mesh, and so its groups: each has a thread of gloo that wakes up 100 times a second."""


class RankFailure(AssertionError):
    """One or more ranks failed, or a world did not finish in time."""


@dataclass
class Worker:
    """One warm process."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    @classmethod
    def start(cls, number: int, logs: Path) -> Worker:
        ours, theirs = socket.socketpair()
        log = logs / f"worker-{number}.log"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            process = warm.Popen(
                [sys.executable, "-m", "tests.ranks.worker", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        return cls(process, Connection(ours.detach()), log)

    def end(self) -> None:
        """End a worker that may be stuck."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def wait_for_its_end(self) -> None:
        """Wait for a worker whose connection was closed: it finishes by itself and writes its coverage."""
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass
class WorkerPool:
    """Warm workers, started when first needed and replaced after a failure that left any of them waiting."""

    workers: list[Worker] = field(default_factory=list)
    leaving: list[Worker] = field(default_factory=list)
    logs: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ranks-")))

    def run(
        self, world_size: int, function: Callable[..., Any], kwargs: dict[str, Any], *, time_limit: float = 200.0
    ) -> list[Any]:
        """Run a function on `world_size` ranks; return their results or raise `RankFailure`."""
        while len(self.workers) < world_size:
            self.workers.append(Worker.start(len(self.workers), self.logs))
        world = self.workers[:world_size]
        starts = [worker.log.stat().st_size for worker in world]
        port = str(free_port())
        for rank, worker in enumerate(world):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            job = Job(function.__module__, function.__qualname__, kwargs, environment)
            worker.connection.send_bytes(pickle.dumps(job))
        try:
            outcomes, verdict = self._collect(world, time_limit)
        except BaseException:
            self.close(kindly=False)  # unread outcomes must not answer the next job
            raise
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
        if not failed and verdict is None:
            self._replace_workers_with_many_threads()
            return [outcomes[rank].value for rank in range(world_size)]
        raise RankFailure(self._report(function, world, starts, outcomes, verdict))

    def _collect(self, world: list[Worker], time_limit: float) -> tuple[dict[int, Outcome], str | None]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + time_limit
        failing_since: float | None = None
        verdict: str | None = None
        while len(outcomes) < len(world):
            waiting = {world[rank].connection: rank for rank in range(len(world)) if rank not in outcomes}
            for ready in wait(list(waiting), timeout=0.2):
                rank = waiting[ready]  # type: ignore[index]
                try:
                    outcomes[rank] = pickle.loads(world[rank].connection.recv_bytes())
                except (EOFError, OSError):
                    code = world[rank].process.wait()
                    outcomes[rank] = Outcome(error=f"the process ended with exit code {code}")
                if outcomes[rank].error is not None and failing_since is None:
                    failing_since = time.monotonic()
            now = time.monotonic()
            if failing_since is not None and now > failing_since + SECONDS_TO_FOLLOW_A_FAILURE:
                verdict = "the others were ended while they waited for it"
            elif now > deadline:
                verdict = f"not finished after {time_limit:g} s"
            if verdict is not None and len(outcomes) < len(world):
                self._show_stacks([world[rank] for rank in waiting.values() if rank not in outcomes])
                break
            verdict = None
        if verdict is not None or any(worker.process.poll() is not None for worker in world):
            self.close(kindly=False)
        return outcomes, verdict

    def _replace_workers_with_many_threads(self) -> None:
        """Let the workers end if one has kept the threads of many process groups; new ones are forked when needed."""
        if any(psutil.Process(worker.process.pid).num_threads() > MOST_THREADS for worker in self.workers):
            for worker in self.workers:
                worker.connection.close()
            self.leaving += self.workers
            self.workers = []

    @staticmethod
    def _show_stacks(workers: list[Worker]) -> None:
        for worker in workers:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)

    @staticmethod
    def _report(
        function: Callable[..., Any],
        world: list[Worker],
        starts: list[int],
        outcomes: dict[int, Outcome],
        verdict: str | None,
    ) -> str:
        lines = [f"{function.__qualname__} on {len(world)} ranks" + (f": {verdict}" if verdict else "")]
        for rank, worker in enumerate(world):
            outcome = outcomes.get(rank)
            if outcome is not None and outcome.error is None:
                continue
            lines.append(f"--- rank {rank} ---\n" + (outcome.error if outcome and outcome.error else "did not finish"))
            with worker.log.open("rb") as log:
                log.seek(starts[rank])
                printed = log.read().decode(errors="replace").strip()
            if printed:
                lines.append(f"[rank {rank} printed]\n{printed[-4000:]}")
        return "\n".join(lines)

    def close(self, kindly: bool = True) -> None:
        """Finish the workers; new ones start when needed."""
        workers, self.workers = self.workers, []
        leaving, self.leaving = self.leaving, []
        for worker in workers:
            if kindly:
                worker.connection.close()
            else:
                worker.end()
        for worker in workers + leaving:
            worker.wait_for_its_end()


def free_port() -> int:
    """Return a port that nobody has: below the range of outgoing connections, and by chance.

    A port that the system chose could be taken again, by another test process or a connection, before rank 0 binds it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


_pools: list[WorkerPool] = []


def new_pool() -> WorkerPool:
    """Return a pool that is closed when the test session ends (`close_pools`, called in conftest.py)."""
    pool = WorkerPool()
    _pools.append(pool)
    return pool


def close_pools() -> None:
    """Finish all workers while there is still time: a test process that lingers at its exit is ended by xdist."""
    for pool in _pools:
        pool.close()


@functools.cache
def shared_pool() -> WorkerPool:
    """Return the pool of this test process."""
    return new_pool()
