"""The store of `meshwright launch --survive` with thousands of members, in health and when one of them is lost.

    python -m benchmarks.agreement                    10, 100 and 1,250 members
    python -m benchmarks.agreement 8000 --machines 1000

The store, the members and the launchers are the real ones: every member is a `Member` with its two connections and its
thread, every launcher asks as its agent does. They have no model and no process group, and share the cores of this
machine. What a group of gloo or NCCL needs of the store to form is apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PROCESSES = 5
"""Which the members are divided among."""
SECONDS_OF_HEALTH = 8.0
STATUS = {"reductions": 123_456, "stepped": True}
Counts = Counter[str]


class CountedStore:
    """A connection that counts its requests, and the bytes of keys and values in both directions."""

    def __init__(self, store: Any, counts: Counts) -> None:
        self._store = store
        self._counts = counts  # of one thread

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            answer = call(*arguments)
            self._counts[name] += 1
            self._counts["bytes"] += _size(arguments) + _size(answer)
            return answer

        return counted


def _size(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run of so many members did to its store."""

    members: int
    machines: int
    requests_in_health: float
    """Per second, by members and launchers."""
    kilobytes_in_health: float
    """Per second."""
    store_in_health: float
    """The share of a core that the store took."""
    requests: Counts
    """From the loss until the last member had agreed."""
    median: float
    """Seconds from the loss until half of the members had agreed."""
    last: float
    """Seconds until all had."""
    store_seconds: float
    """Of a core, for this change."""

    def __str__(self) -> str:
        """Say it as a row."""
        kinds = {kind: count for kind, count in self.requests.items() if kind != "bytes"}
        return (
            f"{self.members:,} members on {self.machines:,} machines. In health: {self.requests_in_health:,.0f} "
            f"requests/s, {self.kilobytes_in_health:,.0f} kB/s, {self.store_in_health:.0%} of a core. "
            f"A loss: half agree after {self.median:.2f} s, all after {self.last:.2f} s; "
            f"{sum(kinds.values()):,} requests ({', '.join(f'{kind} {kinds[kind]:,}' for kind in sorted(kinds))}), "
            f"{self.requests['bytes'] / 1e6:,.1f} MB; {self.store_seconds:.2f} s of the store's core"
        )


def lose_one(members: int, machines: int, seconds_of_health: float = SECONDS_OF_HEALTH) -> Found:
    """Let members live for a while, lose one of them, and wait until the others have agreed."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch looks names up for its log, once in 25 connections
    context = multiprocessing.get_context("spawn")
    store, end = context.Pipe()
    started = [context.Process(target=_store, args=(end, members, machines), daemon=True)]
    started[0].start()
    address = store.recv()
    lost = members // 2
    shares = [list(range(first, members, PROCESSES)) for first in range(min(PROCESSES, members))]
    pipes = []
    others = [list(range(first, machines, PROCESSES)) for first in range(1, 1 + min(PROCESSES, machines - 1))]
    for target, numbers in [*((_members, share) for share in shares), *((_launchers, share) for share in others)]:
        here, end = context.Pipe()
        pipes.append(here)
        started.append(context.Process(target=target, args=(end, address, numbers, members, machines), daemon=True))
        started[-1].start()
    asking = [*pipes, store]
    _ask(pipes, None)  # all are connected
    before, began = _total(asking), time.monotonic()
    time.sleep(seconds_of_health)
    health, seconds = _total(asking) - before, time.monotonic() - began
    before, cpu_before = _total(asking), _ask([store], "cpu")[0]
    lost_at = time.monotonic()
    for pipe in pipes:
        pipe.send(("lose", lost))
    _ask([store], ("lose", lost))
    agreed = sorted(at - lost_at for found in _ask(pipes, None) for at in found)
    change, cpu = _total(asking) - before, _ask([store], "cpu")[0]
    for process in reversed(started):  # the store last
        process.kill()
        process.join()
    assert len(agreed) == members - 1, f"{len(agreed)} of {members - 1} members agreed"
    return Found(
        members=members,
        machines=machines,
        requests_in_health=(health.total() - health["bytes"] - health["cpu"]) / seconds,
        kilobytes_in_health=health["bytes"] / 1e3 / seconds,
        store_in_health=health["cpu"] / 1e6 / seconds,
        requests=Counter({kind: count for kind, count in change.items() if kind != "cpu"}),
        median=agreed[len(agreed) // 2],
        last=agreed[-1],
        store_seconds=cpu - cpu_before,
    )


def _ask(pipes: Sequence[Connection], question: object) -> list[Any]:
    if question is not None:
        for pipe in pipes:
            pipe.send(question)
    return [pipe.recv() for pipe in pipes]


def _total(pipes: Sequence[Connection]) -> Counts:
    return sum(_ask(pipes, "counts"), Counter())


def _counting() -> list[Counts]:
    """Count the requests of every connection that the library makes from now on."""
    from meshwright.launch.processes.elastic import heartbeat, membership
    from meshwright.runtime.membership import events, member

    made: list[Counts] = []
    connect = events.connect

    def counted(*arguments: Any) -> CountedStore:
        made.append(Counter())
        return CountedStore(connect(*arguments), made[-1])

    for module in (membership, heartbeat, member):
        module.connect = counted  # type: ignore[attr-defined]
    return made


def _store(pipe: Connection, members: int, machines: int) -> None:
    """Be the launcher of machine 0, which hosts the store."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from meshwright.launch.processes.elastic.heartbeat import LauncherHeartbeat
    from meshwright.launch.processes.elastic.membership import Membership

    counts = _counting()
    membership = Membership(HashStore(), is_host=True, host="127.0.0.1", replicas=members)
    pipe.send(membership.address)
    heartbeats = None
    while True:
        match pipe.recv():
            case "counts":
                if heartbeats is None and machines > 1:  # everybody is connected
                    heartbeats = LauncherHeartbeat(membership.address, on_lost=_fail, **_machine(0, members, machines))
                pipe.send(sum(counts, Counter({"cpu": round(1e6 * time.process_time())})))
            case "cpu":
                pipe.send(time.process_time())
            case "lose", rank:
                membership.expect(rank, 1)
                membership.remove([rank], f"rank {rank} was killed by SIGKILL")
                pipe.send(None)


def _hold_many_threads() -> None:
    threading.stack_size(256 * 1024)
    sys.setswitchinterval(0.5)  # threads that wait for the interpreter's lock would wake up all the time


def _fail(machine: int) -> None:
    raise RuntimeError(f"machine {machine} was taken for lost: this computer is too slow for so many")


def _machine(number: int, members: int, machines: int) -> dict[str, int]:
    return {"machine": number, "machines": machines, "replicas": members}


def _members(pipe: Connection, address: str, ranks: list[int], members: int, machines: int) -> None:
    from meshwright.runtime.membership.member import Member

    _hold_many_threads()
    counts = _counting()
    present = {rank: Member(address, rank, members, 0) for rank in ranks}
    broken = threading.Event()
    agreed: list[float] = []
    dead: list[int] = []

    def train(member: Member) -> None:
        broken.wait()  # a collective, which fails
        if member.rank in dead:
            member.close()
            return
        member.hears_of_loss()
        agreement = member.agree(STATUS)
        agreed.append(time.monotonic())
        assert set(agreement.statuses) == set(range(members)) - set(dead_everywhere), agreement.statuses.keys()

    dead_everywhere: list[int] = []
    threads = [threading.Thread(target=train, args=(member,), daemon=True) for member in present.values()]
    for thread in threads:
        thread.start()
    pipe.send(None)
    while True:
        match pipe.recv():
            case "counts":
                pipe.send(sum(counts, Counter()))
            case "lose", lost:
                dead_everywhere.append(lost)
                dead.extend({lost} & present.keys())
                broken.set()
                for thread in threads:
                    thread.join()
                pipe.send(agreed)


def _launchers(pipe: Connection, address: str, numbers: list[int], members: int, machines: int) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from meshwright.launch.processes.elastic import membership, surviving
    from meshwright.launch.processes.elastic.heartbeat import LauncherHeartbeat
    from meshwright.runtime.membership.heartbeat import pause

    _hold_many_threads()
    counts = _counting()
    rendezvous = HashStore()
    rendezvous.set(membership._ADDRESS, address)

    def watch(known: membership.Membership) -> None:
        while True:
            known.members()
            time.sleep(pause(surviving.SECONDS_BETWEEN_CHECKS, machines))

    for number in numbers:
        known = membership.Membership(rendezvous, is_host=False, host="", replicas=members)
        LauncherHeartbeat(address, on_lost=_fail, **_machine(number, members, machines))
        threading.Thread(target=watch, args=(known,), daemon=True).start()
    pipe.send(None)
    while True:
        match pipe.recv():
            case "counts":
                pipe.send(sum(counts, Counter()))
            case _:
                pipe.send([])


def main() -> None:
    """Print a line for each number of members."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("members", nargs="*", type=int, default=[10, 100, 1250], help="default: %(default)s")
    parser.add_argument("--machines", type=int, help="default: one per member")
    options = parser.parse_args()
    for number in options.members:
        print(lose_one(number, options.machines or number), flush=True)


if __name__ == "__main__":
    main()
