"""Run several processes by torchelastic, and end all of them when one fails."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from ....errors import REQUEUE_EXIT_CODE, InvalidDataError
from ...console import notify
from ...machines.failure_exchange import SECONDS_TO_EXCHANGE, FailureExchange
from ...machines.preflight import SECONDS_BETWEEN_NOTICES, SECONDS_TO_WAIT
from ..guard import Guard
from ..signals import set_handlers
from ..verdict import Ending, judge
from .job import ElasticJob, LocalOutcome
from .rendezvous import make_rendezvous

SECONDS_FOR_OTHERS_TO_FAIL = 2.0
"""Grace period after the first failure, in which other ranks can fail by themselves and write a record."""
SECONDS_FOR_COLLATERAL_TO_END = 8
SECONDS_FOR_OTHER_MACHINES_TO_END = 300
MAX_PUBLISHED_TEXT = 8000
SECONDS_AFTER_ONE_GAVE_UP = 5


class Agent(LocalElasticAgent):
    """torchelastic's agent, which also records how every rank ended and grants time to end."""

    def __init__(self, job: ElasticJob, guard: Guard) -> None:
        self.job = job
        self.guard = guard
        self.outcome = LocalOutcome()
        self.exchange: FailureExchange | None = None
        self._deadline: float | None = None
        self.rendezvous = self._make_rendezvous()
        spec = WorkerSpec(
            role=job.role,
            local_world_size=job.processes_here,
            entrypoint=job.command[0],
            args=job.command[1:],
            rdzv_handler=self.rendezvous,
            max_restarts=job.max_restarts,
            monitor_interval=job.monitor_interval,
            local_addr=job.local_address,
        )
        logs = DefaultLogsSpecs(
            log_dir=str(job.log_dir), redirects=Std.from_str(job.redirects), tee=Std.from_str(job.tee)
        )
        super().__init__(
            spec, logs, exit_barrier_timeout=SECONDS_FOR_OTHER_MACHINES_TO_END, log_line_prefix_template=job.line_prefix
        )

    def _make_rendezvous(self) -> RendezvousHandler:
        job = self.job
        settings: dict[str, Any] = {"timeout": int(SECONDS_TO_WAIT)} | job.rendezvous_settings
        if job.is_static:
            settings["rank"] = job.machine_rank
        parameters = RendezvousParameters(
            backend=job.backend,
            endpoint=f"[{job.address}]:{job.port}",
            run_id=job.run_id,
            min_nodes=job.min_machines,
            max_nodes=job.max_machines,
            local_addr=job.local_address,
            **settings,
        )
        return make_rendezvous(parameters, is_host=job.is_rendezvous_host, restarts=job.max_restarts > 0)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the processes and start the grace period; on the second signal, kill them."""
        if not self._running():
            raise SystemExit(128 + number)
        if self.outcome.signal is None:
            self.outcome.signal = number
            self._deadline = time.monotonic() + self.job.grace_period
            self._send(number)
            again = "; press Ctrl-C again to end them now" if number == signal.SIGINT else ""
            notify(
                f"{signal.Signals(number).name}: the processes have {self.job.grace_period:g} s to save and end{again}."
            )
        else:
            self._send(signal.SIGKILL)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.job.is_static and self.job.max_machines > 1:
            set_handlers(signal.SIG_DFL)  # torch blocks in C++, where Python runs no handlers
        if self.exchange is not None:
            self.exchange.publish(None)  # releases those who wait for the previous attempt
            self.exchange = None
        with self._notify_of_long_wait():
            super()._rendezvous(worker_group)
        found: Any = worker_group  # torch annotates these numbers as None
        self.outcome.machine_rank = found.group_rank
        if found.group_world_size > 1 and FailureExchange.is_supported(found.store):
            self.exchange = FailureExchange(found.store, found.group_world_size)

    @contextmanager
    def _notify_of_long_wait(self) -> Iterator[None]:
        least, most = self.job.min_machines, self.job.max_machines
        wanted = f"{most}" if least == most else f"{least} to {most}"
        place = f"{self.job.address}:{self.job.port}"
        sentence = (
            f"for {SECONDS_BETWEEN_NOTICES:.0f} s this machine has waited at {place} for others; {wanted} are wanted."
        )
        timer = threading.Timer(SECONDS_BETWEEN_NOTICES, notify, [sentence])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _exit_barrier(self) -> None:
        """Wait for the other machines, which may need the store, while handling signals and failures."""
        if self.exchange is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        self.exchange.mark_done()
        self.exchange.wait(SECONDS_FOR_OTHER_MACHINES_TO_END)
        self._add_remote_culprit()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        set_handlers(self.on_signal)  # torch has just installed its own
        self.guard.watch_groups(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        still_running: set[int] = set()
        failed_elsewhere = self._failed_elsewhere
        if self.outcome.signal is not None:
            self._remaining_restarts = 0
            self._wait_for_exit()
            self._record_endings(worker_group)
            self._publish_failure()
        elif REQUEUE_EXIT_CODE in self._exit_codes().values():
            self._remaining_restarts = 0  # the batch system decides when it restarts
            self._deadline = time.monotonic() + self.job.grace_period
            self._wait_for_exit()
        elif failed_elsewhere or any(code not in (None, 0) for code in self._exit_codes().values()):
            self._wait_for_failures()
            self._record_endings(worker_group)
            self._publish_failure()
            still_running = self._terminate_running()
        result: RunResult = super()._monitor_workers(worker_group)
        if not self._running():
            self._record_endings(worker_group, still_running)
            self._add_remote_culprit()
        return RunResult(state=WorkerState.FAILED) if failed_elsewhere else result

    def report(self) -> None:
        """Print what is to be said at the end of a run, before the verdict: nothing."""

    @property
    def _failed_elsewhere(self) -> bool:
        return self.exchange is not None and self.exchange.culprit is not None

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.outcome.failed:
            left = self._remaining_restarts
            verdict = judge(self.outcome.endings, out_of_memory=False)
            lost = " (it lost another machine)" if verdict.elsewhere else ""
            notify(f"{verdict.headline}{lost}; restarting ({left} more after this).")
            self.outcome.attempts += 1
        else:
            notify("the number of machines changed; restarting with the new number.")
        self.outcome.endings.clear()
        super()._restart_workers(worker_group)

    def _wait_for_exit(self) -> None:
        assert self._deadline is not None
        deadline = self._deadline
        while self._running() and time.monotonic() < deadline:
            codes = self._exit_codes().values()
            if deadline == self._deadline and any(code not in (None, 0, REQUEUE_EXIT_CODE) for code in codes):
                # A rank ended by the signal, so the script has nothing to save: the other ranks only hang.
                deadline = min(deadline, time.monotonic() + SECONDS_AFTER_ONE_GAVE_UP)
            time.sleep(0.05)
        self._send(signal.SIGKILL)

    def _wait_for_failures(self) -> None:
        """Give other ranks a moment to fail by themselves."""
        until = time.monotonic() + SECONDS_FOR_OTHERS_TO_FAIL
        while self._running() and time.monotonic() < until:
            time.sleep(0.02)

    def _terminate_running(self) -> set[int]:
        """Terminate the ranks that still run, and return them."""
        running = set(self._running())
        if running:
            assert self._pcontext is not None
            self._pcontext.close(signal.SIGTERM, SECONDS_FOR_COLLATERAL_TO_END)
        return running

    def _record_endings(self, worker_group: WorkerGroup, ended_by_launcher: Collection[int] = ()) -> None:
        assert self._pcontext is not None
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self.outcome.endings = [
            Ending.read(
                rank=ranks[local_rank],
                local_rank=local_rank,
                exit_code=code or 0,
                error_file=self._pcontext.error_files[local_rank],
                ended_by_launcher=local_rank in ended_by_launcher,
            )
            for local_rank, code in self._exit_codes().items()
        ]

    def _publish_failure(self) -> None:
        """Publish the culprit; where all ranks here only lost their peers, wait briefly for another machine's."""
        if self.exchange is None or not self.outcome.failed:
            return
        verdict = judge(self.outcome.endings, out_of_memory=False)
        if verdict.elsewhere:
            if self.outcome.signal is None:
                self.exchange.wait(SECONDS_TO_EXCHANGE)
            return
        culprit = verdict.culprit
        if culprit.record is not None:
            culprit = replace(culprit, record=culprit.record | {"text": culprit.record["text"][:MAX_PUBLISHED_TEXT]})
        machine = f"machine {self.outcome.machine_rank} ({socket.gethostname()})"
        self.exchange.publish(asdict(replace(culprit, machine=machine, crash=culprit.crash[:MAX_PUBLISHED_TEXT])))

    def _add_remote_culprit(self) -> None:
        if self.exchange is not None and self.exchange.culprit is not None:
            try:
                culprit = Ending.from_message(self.exchange.culprit)
            except InvalidDataError as error:
                notify(f"{error}: what failed on another machine is said there.")
                return
            if culprit.rank not in (ending.rank for ending in self.outcome.endings):
                self.outcome.endings.append(culprit)

    def _processes(self) -> dict[int, Any]:
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {local_rank: handler.proc for local_rank, handler in context.subprocess_handlers.items()}

    def _exit_codes(self) -> dict[int, int | None]:
        return {local_rank: process.poll() for local_rank, process in self._processes().items()}

    def _running(self) -> list[int]:
        return [local_rank for local_rank, code in self._exit_codes().items() if code is None]

    def _send(self, number: int) -> None:
        for local_rank in self._running():
            with suppress(ProcessLookupError):
                os.killpg(self._processes()[local_rank].pid, number)
