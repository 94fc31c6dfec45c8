"""Replace single processes while the others train: `meshwright launch --survive`.

[Note: who is replaced] A process that ends with an error leaves: the launcher tells the other members through the store
and starts another process for the same rank. That one runs the script from the start, asks the members to let it join,
and is a member from then on. The whole run ends, with the verdict, when waiting for a replacement cannot help:
- training has not begun: nobody has anything that a replacement could copy;
- no member is left that trains;
- three replacements of a rank in a row have failed before they joined;
- the same exception was raised in the same line three times: it is the script's.
Errors of a rank that only lost a peer do not count, nor do signals, which come from outside.

[Note: replicas of several processes] A replica may be spread over processes of one machine. When one of them ends, the
others are killed: all leave in one event, and all are replaced.

[Note: fences] The members can also remove a rank whose process is still there, because it does not answer. Its launcher
then kills the process, so that it cannot come back into a run that went on without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext, to_map

from ....config.environment import INCARNATION, MEMBERSHIP_STORE, patch_environment
from ....errors import REQUEUE_EXIT_CODE, LaunchError
from ....runtime.membership.events import RETRACTED
from ....runtime.membership.heartbeat import pause
from ...console import notify
from ..guard import Guard
from ..verdict import Ending, describe, kind_of_failure
from . import sentences
from .agent import SECONDS_FOR_COLLATERAL_TO_END, Agent
from .heartbeat import LauncherHeartbeat
from .job import ElasticJob
from .membership import Membership, ReplacementTotals
from .record import AttemptRecord
from .replacement import LocalReplica, Replacement, Streams, end_group, end_process, wait_for_end

MOST_FAILURES = 3
SECONDS_BETWEEN_CHECKS = 0.1
"""Of the members; the end of a process is seen at once."""


class SurvivingAgent(Agent):
    """The agent that replaces single processes: [Note: who is replaced]."""

    def __init__(self, job: ElasticJob, guard: Guard) -> None:
        super().__init__(replace(job, monitor_interval=0.001), guard)  # `_monitor_workers` waits
        self.replicas: dict[int, LocalReplica] = {}
        """By local rank."""
        self._membership: Membership | None = None
        self._replacements: dict[int, Replacement] = {}
        self._exceptions: Counter[tuple[object, ...]] = Counter()
        self._heartbeat: LauncherHeartbeat | None = None
        """With several machines."""
        self._totals = ReplacementTotals()
        """Of earlier attempts."""
        self._started, self._started_at = time.monotonic(), time.time()
        self._record: AttemptRecord | None = None
        """On machine 0."""

    @property
    def membership(self) -> Membership:
        """The members of this attempt."""
        assert self._membership is not None
        return self._membership

    @property
    def _context(self) -> Any:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def report(self) -> None:
        """Print how many processes were replaced, and how long training stood still."""
        if self._membership is not None and self.outcome.machine_rank == 0:
            totals = self._totals + self._membership.totals()
            if totals.replacements:
                notify(totals.sentence(time.monotonic() - self._started))
            if self._record is not None:
                self._record.end()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the members; replacements that have not joined have nothing to save."""
        if self.outcome.signal is None:
            self._dismiss_replacements()
        super().on_signal(number, frame)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._membership is not None and self.outcome.machine_rank == 0:
            self._totals += self._membership.totals()
        super()._rendezvous(worker_group)
        found: Any = worker_group  # torch annotates these as None
        self._membership = Membership(
            found.store,
            is_host=found.group_rank == 0,
            host=found.master_addr,
            replicas=found.workers[0].world_size,
        )
        self._record = AttemptRecord(self.membership, self._totals, self._started_at) if found.group_rank == 0 else None
        if found.group_world_size > 1:
            self._heartbeat = LauncherHeartbeat(
                self.membership.address,
                machine=found.group_rank,
                machines=found.group_world_size,
                replicas=found.workers[0].world_size,
                on_lost=self._on_lost_machine,
            )

    def _on_lost_machine(self, machine: int) -> None:
        notify(f"no heartbeat from machine {machine}; the others continue without it.")
        if self.exchange is not None:
            self.exchange.mark_done()  # in its place: nobody waits for it at the end

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with patch_environment(**self._variables(0)):
            pids = super()._start_workers(worker_group)
        folders = {local_rank: Path(file).parent for local_rank, file in self._context.error_files.items()}
        self.replicas = {
            worker.local_rank: LocalReplica(rank=worker.global_rank, folder=folders[worker.local_rank])
            for worker in worker_group.workers
        }
        self._exceptions.clear()
        return pids

    def _variables(self, incarnation: int) -> dict[str, str]:
        return {MEMBERSHIP_STORE: self.membership.address, INCARNATION: str(incarnation)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._heartbeat is not None and self._heartbeat.is_given_up:
            self._leave_the_others()
        seconds = pause(SECONDS_BETWEEN_CHECKS, worker_group.group_world_size or 1)
        wait_for_end([self._processes()[local_rank].pid for local_rank in self._running()], seconds)
        codes = self._exit_codes()
        if self.outcome.signal is None and not self._failed_elsewhere:  # looked at last: a signal ends processes
            if REQUEUE_EXIT_CODE in codes.values():
                self._dismiss_replacements()
            elif (result := self._watch(worker_group, codes)) is not None:
                return result
        return super()._monitor_workers(worker_group)

    def _leave_the_others(self) -> NoReturn:
        """End this launch, whose machine was given up."""
        here = {replica.rank for replica in self.replicas.values()}
        if again := here & set(self.membership.members()):  # they have joined in the meantime
            self.membership.remove(again, "its machine was given up")
        raise LaunchError("The other machines went on without this one, because it sent no heartbeat for a while.")

    def _watch(self, worker_group: WorkerGroup, codes: Mapping[int, int | None]) -> RunResult | None:
        """Replace the processes that ended; return None if the run has to end with these exit codes."""
        self._compare_with_members(codes)
        if self._record is not None:
            self._record.update()
        if all(code == 0 for code in codes.values()):
            return None
        if self._is_over(codes):
            notify("training is over: the replacements that have not joined are not needed any more.")
            self._dismiss_replacements()
            self._context.close(signal.SIGTERM, SECONDS_FOR_COLLATERAL_TO_END)
            self.outcome.endings = []
            returned: dict[int, Any] = {replica.rank: None for replica in self.replicas.values()}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=returned)
        failed = {local_rank: code for local_rank, code in codes.items() if code not in (None, 0)}
        # Asked here, because the thread that sends heartbeats may still wait for the network.
        if failed and self._heartbeat is not None and self.membership.is_given_up(self.outcome.machine_rank):
            self._leave_the_others()
        if failed and not self._replace(worker_group, failed):
            return None
        return RunResult(state=WorkerState.HEALTHY)

    def _compare_with_members(self, codes: Mapping[int, int | None]) -> None:
        """Note who has joined, fence who was removed by the others, and pass on who has ended well."""
        members = self.membership.members()
        for local_rank, replica in self.replicas.items():
            if codes[local_rank] == 0 and not replica.is_done:
                replica.is_done = True
                self.membership.mark_done(replica.rank)
            if replica.is_member == (replica.rank in members):
                continue
            [ranks] = self.membership.by_replica([replica.rank])
            has_ended = codes[local_rank] is not None
            if replica.is_member:
                if not has_ended:
                    self._fence(local_rank, replica)
            elif not self.membership.is_outdated(replica.rank, replica.incarnation):
                replica.join()  # also one that has failed since: it is no replacement that failed before it joined
                if replica.rank == ranks[-1]:
                    notify(sentences.joined(ranks, len(self.membership.by_replica(members))))
            elif not has_ended:
                self.membership.remove(ranks, "its process had ended when it was let in")

    def _fence(self, local_rank: int, replica: LocalReplica) -> None:
        """Kill the process of a rank that the others removed, unless it asks to join once more: [Note: fences]."""
        replica.is_member = False
        reason = self.membership.why_removed(replica.rank)
        if reason != RETRACTED:
            notify(f"the others go on without rank {replica.rank} ({reason}): its process is killed.")
            end_group(self._processes()[local_rank].pid)

    def _is_over(self, codes: Mapping[int, int | None]) -> bool:
        """Return whether all members have ended well, on every machine, and only replacements are left here."""
        if any(codes[local_rank] != 0 and replica.is_member for local_rank, replica in self.replicas.items()):
            return False
        return bool(self.membership.members()) and not self.membership.still_training()

    def _replace(self, worker_group: WorkerGroup, failed: Mapping[int, int | None]) -> bool:
        """Start replacements of failed processes; return False if [Note: who is replaced] says no."""
        if not self.membership.has_begun():
            return False
        endings = {local_rank: self._ending(local_rank, code) for local_rank, code in failed.items()}
        broken = self.membership.by_replica(ending.rank for ending in endings.values())
        leaving = [local for local, replica in self.replicas.items() if any(replica.rank in ranks for ranks in broken)]
        self._remove(leaving, endings.values())
        training = self.membership.by_replica(self.membership.still_training())
        if not training:
            return False
        hopeless = [self._why_hopeless(self.replicas[local_rank], ending) for local_rank, ending in endings.items()]
        if any(hopeless):
            notify("; ".join(filter(None, hopeless)) + ": the run ends.")
            return False
        waiting = [replica.rank for replica in self.replicas.values() if replica.previous is not None]
        for sentence in sentences.left(endings.values(), broken, len(training), waiting):
            notify(sentence)
        for local_rank in leaving:  # [Note: replicas of several processes]
            end_group(self._processes()[local_rank].pid)
        for local_rank in leaving:
            killed = replace(self._ending(local_rank, -signal.SIGKILL), ended_by_launcher=True)
            self._start_replacement(worker_group, local_rank, endings.get(local_rank, killed))
        self.membership.count_replacements(len(broken))
        return True

    def _remove(self, leaving: Collection[int], endings: Collection[Ending]) -> None:
        """Tell the members, in one event, that processes of this machine leave."""
        replicas = [self.replicas[local_rank] for local_rank in leaving]
        for replica in replicas:
            self.membership.expect(replica.rank, replica.incarnation + 1)
        present = self.membership.members()
        if members := [replica.rank for replica in replicas if replica.rank in present]:
            causes = [ending for ending in endings if ending.rank in members]
            self.membership.remove(members, "; ".join(f"rank {end.rank} {sentences.how(end)}" for end in causes))

    def _ending(self, local_rank: int, code: int | None) -> Ending:
        return Ending.read(
            rank=self.replicas[local_rank].rank,
            local_rank=local_rank,
            exit_code=code or 0,
            error_file=self._context.error_files[local_rank],
            ended_by_launcher=False,
        )

    def _why_hopeless(self, replica: LocalReplica, ending: Ending) -> str | None:
        """Count a failure; return why another replacement cannot help, or None if it can."""
        if replica.previous is not None:
            replica.failures += 1
            if replica.failures == MOST_FAILURES:
                return f"{MOST_FAILURES} replacements of rank {ending.rank} in a row have failed before they joined"
        if ending.exit_code > 0 and not ending.lost_a_peer:
            kind = kind_of_failure(ending)
            self._exceptions[kind] += 1
            if self._exceptions[kind] == MOST_FAILURES:
                return f"the same failure ({describe(ending)}) came {MOST_FAILURES} times, now on rank {ending.rank}"
        return None

    def _start_replacement(self, worker_group: WorkerGroup, local_rank: int, ending: Ending) -> None:
        replica, context = self.replicas[local_rank], self._context
        end_process(self._processes()[local_rank])
        replica.leave(ending)
        earlier = self._replacements.get(local_rank)
        started = self._replacements[local_rank] = Replacement(
            local_rank,
            (context.entrypoint, *context.args[local_rank]),
            os.environ | context.envs[local_rank] | self._variables(replica.incarnation),
            replica.folder_now,
            self._streams(local_rank),
        )
        context.subprocess_handlers[local_rank] = started
        context.error_files[local_rank] = started.error_file
        worker_group.workers[local_rank].id = started.proc.pid
        self.guard.watch_groups([started.proc.pid])
        if earlier is not None:
            earlier.release()
        if self.outcome.signal is not None:  # it came while the process was started
            self._dismiss_replacements()

    def _streams(self, local_rank: int) -> Streams:
        number = self.job.processes_here
        return Streams(
            redirects=to_map(Std.from_str(self.job.redirects), number)[local_rank],
            tee=to_map(Std.from_str(self.job.tee), number)[local_rank],
            prefix=self.job.line_prefix.replace("${rank}", str(self.replicas[local_rank].rank)),
        )

    def _dismiss_replacements(self) -> None:
        """Kill the replacements that have not joined; their ends count as good ones."""
        for local_rank in self._running():
            replica = self.replicas[local_rank]
            if not replica.is_member:
                replica.is_dismissed = True
                end_group(self._processes()[local_rank].pid)

    def _exit_codes(self) -> dict[int, int | None]:
        codes = super()._exit_codes()
        dismissed = [local_rank for local_rank, replica in self.replicas.items() if replica.is_dismissed]
        return codes | {local_rank: 0 for local_rank in dismissed if codes[local_rank] is not None}

    def _record_endings(self, worker_group: WorkerGroup, ended_by_launcher: Collection[int] = ()) -> None:
        """Record for a replacement that has not joined, and did not fail itself, what it was to replace."""
        super()._record_endings(worker_group, ended_by_launcher)
        waiting = {*self._running(), *ended_by_launcher}
        previous = {local_rank: self.replicas[local_rank].previous for local_rank in waiting}
        self.outcome.endings = [previous.get(ending.local_rank) or ending for ending in self.outcome.endings]

    def _shutdown(self, *args: Any, **options: Any) -> None:
        super()._shutdown(*args, **options)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        while self._replacements:
            self._replacements.popitem()[1].release()
