"""Replicas that keep the protocol of membership, and go wrong where told: `replicas.py FAULT`, such as `joining_1`.

With the fault `in_pairs` nothing goes wrong, and two processes are a replica.

They write which process they are to files, and end when the file `finish` or `finish_RANK` is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from meshwright.runtime.membership.events import RETRACTED, Events, connect, whole_replicas

RANK, SIZE, INCARNATION = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MESHWRIGHT_INCARNATION"))
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
SHARDS = 2 if FAULT == "in_pairs" else 1


def go_wrong(moment: str) -> None:
    if FAULT not in (moment, f"{moment}_{RANK}"):
        return
    if moment == "never_joining":
        time.sleep(600)
    raise ValueError("the label 17 is out of range")


def write(name: str, text: str = "") -> None:
    Path(f"{name}.new").write_text(text)
    Path(f"{name}.new").rename(name)


def save_and_leave(number: int, frame: object) -> None:
    time.sleep(0.3)
    os._exit(75)


def main() -> None:
    store = connect(os.environ["MESHWRIGHT_MEMBERSHIP_STORE"])
    Path(f"store_{RANK}").write_text(os.environ["MESHWRIGHT_MEMBERSHIP_STORE"])
    events = Events(store, SIZE)
    print(f"rank {RANK} of {SIZE}, process {INCARNATION}")
    write(f"pid_{RANK}_{INCARNATION}", str(os.getpid()))
    go_wrong("starting")
    if INCARNATION:
        go_wrong("joining")
        go_wrong("never_joining")
        store.set(f"waiting/{RANK}", str(INCARNATION))
        while RANK not in events.members(events.newest()):
            time.sleep(0.02)
    else:
        store.add("ready", 1)
        while store.add("ready", 0) < SIZE:
            time.sleep(0.02)
        events.tell_shards(SHARDS)
        events.mark_begun()
        signal.signal(signal.SIGTERM, save_and_leave)
    write(f"member_{RANK}_{INCARNATION}")
    train(store, events)


def train(store: object, events: Events) -> None:
    seen = events.newest()
    while not Path("finish").exists() and not Path(f"finish_{RANK}").exists():
        go_wrong("training")
        if Path(f"retract_{RANK}").exists():
            Path(f"retract_{RANK}").unlink()
            events.publish("left", [RANK], RETRACTED)
            time.sleep(0.5)
            while RANK not in events.members(events.newest()):
                time.sleep(0.02)
            write(f"back_{RANK}")
        members = events.members(events.newest())
        if members and members[0] == RANK:
            let_in(store, events)
            remove_on_request(events, members)
        newest = events.newest()
        for number in range(seen + 1, newest + 1):
            if events.read(number).kind == "left" and events.members(number)[:1] == (RANK,):
                store.add("lost_ms", 250)  # type: ignore[attr-defined]
                write(f"left_{number}", str(events.read(number).time))
        seen = newest
        time.sleep(0.02)


def let_in(store: object, events: Events) -> None:
    waiting = []
    for rank in range(SIZE):
        keys = f"waiting/{rank}", f"incarnation/{rank}"
        if rank in events.members(events.newest()) or not store.check(list(keys)):  # type: ignore[attr-defined]
            continue
        if store.get(keys[0]) == store.get(keys[1]):  # type: ignore[attr-defined]
            waiting.append(rank)
    for replica in {whole_replicas([rank], SHARDS) for rank in waiting}:
        if set(replica) <= set(waiting):
            events.publish("joined", replica, "")


def remove_on_request(events: Events, members: tuple[int, ...]) -> None:
    for rank in members:
        if Path(f"remove_{rank}").exists():
            Path(f"remove_{rank}").unlink()
            events.publish("left", [rank], "it does not answer")


if __name__ == "__main__":
    main()
