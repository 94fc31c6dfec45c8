"""What a launch with `--survive` says about replicas that leave and join."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from ..verdict import Ending, describe


def how(ending: Ending) -> str:
    """Say how a process ended."""
    return f"was {describe(ending)}" if ending.signal_name else f"failed ({describe(ending)})"


def left(
    endings: Iterable[Ending], replicas: Iterable[Sequence[int]], training: int, waiting: Collection[int]
) -> Iterator[str]:
    """Say which processes of which replicas ended, and what follows; `waiting` ranks had not joined yet.

    Processes that only lost a peer of their replica are left out.
    """
    count = "1 replica continues" if training == 1 else f"{training} replicas continue"
    endings = list(endings)
    for ranks in replicas:
        ended = [ending for ending in endings if ending.rank in ranks]
        for ending in [ending for ending in ended if not ending.lost_a_peer] or ended:
            early = " before it had joined" if ending.rank in waiting else ""
            whole = f"; its replica ({_named(ranks)}) leaves" if len(ranks) > 1 else ""
            yield f"rank {ending.rank} {how(ending)}{early}{whole}; {count}, a replacement is starting."


def joined(ranks: Sequence[int], replicas: int) -> str:
    """Say that a replica has joined."""
    return f"{_named(ranks)} {'have' if len(ranks) > 1 else 'has'} joined; {replicas} replicas train."


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
