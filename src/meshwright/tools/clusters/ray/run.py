"""Run the ranks until they end: start actors, watch them, find how each one ended, and start again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import _meshwright_start as door

from ....config.environment import VISIBLE_DEVICES
from ....errors import REQUEUE_EXIT_CODE
from ....launch.processes.elastic.job import LocalOutcome
from ....launch.processes.signals import handled_by
from ....launch.processes.verdict import Ending, Verdict, judge
from ....runtime.group.network import loopback
from .placement import ClusterRequest, RankPlacement, draining_nodes, reserved
from .rank import RankActor, RankProcess, RankResult, read_ending, signal_processes

SECONDS_FOR_OTHERS_TO_FAIL = 2.0
SECONDS_FOR_COLLATERAL_TO_END = 8.0
SECONDS_TO_READ_FILES = 30.0
SECONDS_BETWEEN_LOOKS = 0.5
LOST_PROCESS = "its process is gone"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every rank does: a method of `RankActor`, what it is called with, and the settings as variables."""

    method: str
    arguments: tuple[Any, ...]
    variables: Mapping[str, str]
    max_restarts: int = 0
    grace_period: float = 30.0
    runtime_env: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class RayOutcome(LocalOutcome):
    """How the ranks of the last attempt ended."""

    answers: dict[int, RankResult] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        """Find the rank that failed first."""
        return judge(self.endings, out_of_memory=False)


def run(work: Work, request: ClusterRequest, say: Callable[[str], None]) -> RayOutcome:
    """Run the ranks; after a failure start them again, on the nodes that there are then."""
    signals: list[int] = []
    for attempt in range(work.max_restarts + 1):
        with reserved(request, say) as (group, places), handled_by(lambda number, frame: signals.append(number)):
            ranks = RankActors(work, group, places, request.resources, attempt)
            try:
                outcome = ranks.run(signals, say)
            finally:
                ranks.end(places)
        left = work.max_restarts - attempt
        if not outcome.failed or outcome.signal is not None or left == 0:
            break
        saved = "the workers saved and left, because a node is to be taken away"
        why = saved if outcome.asks_for_restart else outcome.verdict().headline
        say(f"{why}; restarting ({left - 1} more after this).")
    return outcome


class RankActors:
    """The actors of one attempt."""

    def __init__(
        self, work: Work, group: Any, places: Sequence[RankPlacement], resources: Mapping[str, float], attempt: int
    ) -> None:
        self._work = work
        self._places = places
        self._attempt = attempt
        self._ranks: dict[int, RankProcess] = {}
        self._several_nodes = len({place.node_id for place in places}) > 1
        self._stopped: dict[int, Ending] = {}
        self._warned: set[str] = set()
        self._actors = {place.rank: _actor(group, place, resources, work.runtime_env) for place in places}

    def run(self, signals: list[int], say: Callable[[str], None]) -> RayOutcome:
        """Run all ranks. After the first failure the others get a moment to fail by themselves, and are ended."""
        outcome = RayOutcome(attempts=self._attempt + 1)
        started = {actor.process.remote(): self._places[rank] for rank, actor in self._actors.items()}
        lost, _ = self._watch(started, outcome, signals, say, self._ranks.__setitem__)
        running: set[int] = set()
        if not lost and outcome.signal is None:
            method = {rank: getattr(actor, self._work.method) for rank, actor in self._actors.items()}
            work = {
                method[place.rank].remote(self._variables(place), *self._work.arguments): place
                for place in self._places
            }
            lost, running = self._watch(work, outcome, signals, say, outcome.answers.__setitem__)
        self.end(place for place in self._places if place.rank in running)
        written = self._written(lost.keys() | running)
        ended = {rank: written.get(rank) or _lost_process(rank, error) for rank, error in lost.items()}
        ended |= {rank: answer.ending for rank, answer in outcome.answers.items()}
        # Ranks that have not begun, or that were ended, only waited for others. They may have said so.
        for rank in self._actors.keys() - ended.keys() | running:
            said = self._stopped.get(rank) or written.get(rank) or _ended_by_launcher(rank)
            ended[rank] = replace(said, ended_by_launcher=True)
        outcome.endings = [self._on_node_of(ended[rank]) for rank in sorted(ended)]
        return outcome

    def end(self, places: Iterable[RankPlacement]) -> None:
        """End actors, and with them what they started."""
        import ray

        for place in places:
            ray.kill(self._actors[place.rank], no_restart=True)

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch(
        self,
        calls: dict[Any, RankPlacement],
        outcome: RayOutcome,
        signals: list[int],
        say: Callable[[str], None],
        keep: Callable[[int, Any], None],
    ) -> tuple[dict[int, Exception], set[int]]:
        """Wait for calls; return the ranks whose processes are gone, and those that did not end by themselves."""
        import ray

        lost: dict[int, Exception] = {}
        deadline: float | None = None
        pending = dict(calls)
        while pending and (deadline is None or time.monotonic() < deadline):
            for call in ray.wait(list(pending), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)[0]:
                place = pending.pop(call)
                try:
                    keep(place.rank, ray.get(call))
                except ray.exceptions.RayError as error:
                    lost[place.rank] = error
            codes = {answer.ending.exit_code for answer in outcome.answers.values()} - {0}
            if signals:
                deadline = self._on_signal(signals, outcome, deadline, say)
            elif deadline is None and (lost or codes):
                saving = codes == {REQUEUE_EXIT_CODE} and not lost
                deadline = time.monotonic() + (self._work.grace_period if saving else SECONDS_FOR_OTHERS_TO_FAIL)
            self._warn_of_draining(say)
        running = {place.rank for place in pending.values()}
        if running and self._work.method == "run_script":
            self._end_children(pending)
        return lost, running

    def _on_signal(
        self, signals: list[int], outcome: RayOutcome, deadline: float | None, say: Callable[[str], None]
    ) -> float:
        """Pass the first signal on as SIGTERM, which Ray does not block; the second ends the wait."""
        number = signals.pop()
        if outcome.signal is not None:
            return 0.0
        outcome.signal = number
        seconds = self._work.grace_period
        say(f"{signal.Signals(number).name}: the workers have {seconds:g} s to save and end; send it again to end now.")
        self._signal(self._places, signal.SIGTERM)
        return time.monotonic() + seconds

    def _warn_of_draining(self, say: Callable[[str], None]) -> None:
        """Name the nodes that are to be taken away; no task starts there any more, so their ranks look themselves."""
        if not self._ranks:
            return
        for node in draining_nodes() - self._warned:
            self._warned.add(node)
            if there := [place for place in self._places if place.node_id == node]:
                say(f"node {there[0].address} is to be taken away: its workers get SIGTERM.")

    def _end_children(self, pending: Mapping[Any, RankPlacement]) -> None:
        """Let actors end their scripts, which would outlive them for some seconds and keep their devices."""
        import ray

        for seconds in (SECONDS_FOR_COLLATERAL_TO_END, SECONDS_FOR_OTHERS_TO_FAIL):
            self._signal(pending.values(), signal.SIGTERM)
            done, left = ray.wait(list(pending), num_returns=len(pending), timeout=seconds)
            if not left:
                break
        for call in done:
            with suppress(ray.exceptions.RayError):
                if isinstance(answer := ray.get(call), RankResult):
                    self._stopped[answer.ending.rank] = answer.ending

    def _signal(self, places: Iterable[RankPlacement], number: int) -> None:
        import ray

        pids: dict[str, list[int]] = {}
        for place in places:
            if place.rank in self._ranks:
                pids.setdefault(place.node_id, []).append(self._ranks[place.rank].pid)
        sent = [_task_on(node, signal_processes).remote(there, number) for node, there in pids.items()]
        ray.wait(sent, num_returns=len(sent), timeout=SECONDS_FOR_COLLATERAL_TO_END) if sent else None

    # --- how ranks ended ----------------------------------------------------------------------------------------------

    def _written(self, ranks: Iterable[int]) -> dict[int, Ending]:
        """Read what ranks have written before their processes ended; Ray reports every such end in the same words."""
        import ray

        read = {
            rank: _task_on(self._places[rank].node_id, read_ending).remote(rank, self._ranks[rank].error_file)
            for rank in ranks
            if rank in self._ranks
        }
        end = time.monotonic() + SECONDS_TO_READ_FILES
        found = {}
        for rank, call in read.items():
            with suppress(ray.exceptions.RayError):  # the node is gone
                if (ending := ray.get(call, timeout=max(0.0, end - time.monotonic()))) is not None:
                    found[rank] = ending
        return found

    def _on_node_of(self, ending: Ending) -> Ending:
        machine = f"node {self._places[ending.rank].address}" if self._several_nodes else None
        return replace(ending, local_rank=self._places[ending.rank].local_rank, machine=machine)

    def _variables(self, place: RankPlacement) -> dict[str, str]:
        first = self._places[0]
        numbers = {
            "RANK": place.rank,
            "WORLD_SIZE": len(self._places),
            "LOCAL_RANK": place.local_rank,
            "LOCAL_WORLD_SIZE": place.local_world_size,
            "GROUP_RANK": place.node_rank,
            "GROUP_WORLD_SIZE": len({each.node_id for each in self._places}),
            "MASTER_PORT": self._ranks[0].free_port,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._work.max_restarts,
        }
        address = first.address if self._several_nodes else loopback()
        devices = [
            device
            for each in self._places
            if each.node_id == place.node_id
            for device in self._ranks[each.rank].devices
        ]
        # All ranks of a node see its devices, as under any launcher: local rank r takes device r. Ranks that share a
        # device keep what Ray gave them.
        shared = {}
        if len(devices) == len(set(devices)) == place.local_world_size:
            shared = {VISIBLE_DEVICES["cuda"][0]: ",".join(devices)}
        ranks = {name: str(number) for name, number in numbers.items()}
        return {**self._work.variables, **ranks, **shared, "MASTER_ADDR": address}


def _actor(
    group: Any, place: RankPlacement, resources: Mapping[str, float], runtime_env: Mapping[str, Any] | None
) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {named[name]: number for name, number in resources.items() if name in named}
    options["resources"] = {name: number for name, number in resources.items() if name not in named}
    if door.is_open():  # a cluster that runs already has not got the variable from this process
        variables = {door.VARIABLE: "1", **((runtime_env or {}).get("env_vars") or {})}
        runtime_env = {**(runtime_env or {}), "env_vars": variables}
    if runtime_env is not None:
        options["runtime_env"] = dict(runtime_env)
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=place.bundle)
    return ray.remote(RankActor).options(scheduling_strategy=where, **options).remote(place.rank)


def _task_on(node: str, function: Callable[..., Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)


def _ended_by_launcher(rank: int) -> Ending:
    return Ending(rank=rank, local_rank=0, exit_code=-signal.SIGTERM, ended_by_launcher=True)


def _lost_process(rank: int, error: Exception) -> Ending:
    """Return the ending of a rank that has left no word."""
    reported = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
    record: dict[str, Any] = {
        "type": LOST_PROCESS,
        "text": "Ray does not know why: it was killed, ran out of memory, called os._exit, or its node was lost.",
        "cause": f"{type(error).__name__}: {reported}",
        "diagnosis": None,
        "frames": [],
        "time": 0.0,  # before the errors of those who lost it
    }
    return Ending(rank=rank, local_rank=0, exit_code=1, record=record)
