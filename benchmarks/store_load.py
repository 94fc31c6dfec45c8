"""One store with the connections and the questions of 10,000 watchers; and their round when a rank is stuck."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PROCESSES = 5
SECONDS = 8.0
KEY = "accelerate/watch/1/alarm/0"


@dataclass(frozen=True)
class Load:
    """How a store bears the questions of many ranks."""

    ranks: int
    connections: int
    questions_per_second: float
    median_us: float
    slow_us: float
    """The slowest of a hundred."""
    cpu: float
    """The share of a core that the store takes."""
    megabytes: float
    """What the store's process holds, torch included."""

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.connections:,} connections ask {self.questions_per_second:,.0f} questions a second, as often as "
            f"{self.ranks:,} ranks: median {self.median_us:.0f} us, 99th of 100 {self.slow_us:.0f} us; the store takes "
            f"{self.cpu:.0%} of a core, and its process {self.megabytes:.0f} MB"
        )


def load_of_the_store(ranks: int) -> Load:
    """Connect as many clients as there are ranks, and let each ask as often as its watcher would."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch looks names up for its log, once in 25 connections
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,))
    server.start()
    port = here.recv()
    shares = [len(range(number, ranks, PROCESSES)) for number in range(PROCESSES)]
    pipes = [context.Pipe() for _ in shares]
    clients = [
        context.Process(target=_ask, args=(port, ranks, share, end))
        for share, (_, end) in zip(shares, pipes, strict=True)
    ]
    for client in clients:
        client.start()
    for pipe, _ in pipes:
        pipe.recv()  # connected
    here.send("begin")
    for pipe, _ in pipes:
        pipe.send("begin")
    took = sorted(seconds for pipe, _ in pipes for seconds in pipe.recv())
    here.send("end")
    cpu, megabytes = here.recv()
    for process in (*clients, server):
        process.join()
    return Load(
        ranks=ranks,
        connections=sum(shares),
        questions_per_second=len(took) / SECONDS,
        median_us=took[len(took) // 2] * 1e6,
        slow_us=took[len(took) * 99 // 100] * 1e6,
        cpu=cpu,
        megabytes=megabytes,
    )


def _serve(pipe: Connection) -> None:
    import psutil
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    begun, cpu = time.monotonic(), time.process_time()
    pipe.recv()
    pipe.send(((time.process_time() - cpu) / (time.monotonic() - begun), psutil.Process().memory_info().rss / 1e6))


def _ask(port: int, ranks: int, share: int, pipe: Connection) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from meshwright.watch.hangs.watcher import POLL_SECONDS, RANKS_PER_SECOND

    stores = [TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(share)]
    pipe.send("connected")
    pipe.recv()
    pause = max(POLL_SECONDS, ranks / RANKS_PER_SECOND) / share
    pipe.send(_questions(stores, pause))


def _questions(stores: Sequence[Any], pause: float) -> list[float]:
    took: list[float] = []
    begun = time.monotonic()
    while (now := time.monotonic()) < begun + SECONDS:
        time.sleep(max(0.0, begun + len(took) * pause - now))
        start = time.perf_counter()
        stores[len(took) % len(stores)].check([KEY])
        took.append(time.perf_counter() - start)
    return took


def seconds_of_a_round(ranks: int) -> float:
    """Return how long reports of so many ranks take to be written by one client, read, decided on and answered."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from meshwright.watch.hangs.verdict import judge
    from meshwright.watch.place import COLLECTIVE, Place
    from meshwright.watch.reports import ProcessReport

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = time.monotonic()
    for rank in range(ranks):
        call = "gather()" if rank == 0 else "backward()"
        place = Place(
            phase=COLLECTIVE, call=call, operation=f"{call[:-2]}(float32[4])", file="train.py", line=88 - rank % 2
        )
        store.set(
            f"report/{rank}",
            ProcessReport(
                rank=rank, place=place, stalled_seconds=30.0, idle_seconds=30.0, collectives_started=5
            ).to_json(),
        )
        store.add("reports", 1)
    texts = store.multi_get([f"report/{rank}" for rank in range(ranks)])
    verdict = judge({rank: ProcessReport.from_json(text) for rank, text in enumerate(texts)}, {}, 30.0)
    assert verdict.culprits == [0]
    for _ in range(ranks):  # everybody looks again
        store.add("unmoved", 1)
    store.set("verdict", verdict.to_json())
    return time.monotonic() - begun


if __name__ == "__main__":
    for number in (100, 1_000, 10_000):
        print(load_of_the_store(number))
        print(f"a round of {number:,} ranks: {seconds_of_a_round(number):.2f} s", flush=True)
