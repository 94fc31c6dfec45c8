"""The order in which every rank calls what all ranks have to call together: backward passes, steps, the end.

Each rank writes a letter for each to a file of its own. It is there also where a rank waits for ever or is killed.
"""

from __future__ import annotations

import time
from pathlib import Path

_BACKWARD, _STEP, _END = "b", "s", "e"
_WORDS = {_BACKWARD: "begins a backward pass", _STEP: "steps its optimizer", _END: "ends"}
_SECONDS_FOR_OTHERS = 30.0


class CallOrder:
    """The calls of one rank."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._write("")

    def begin_pass(self) -> None:
        """Write down that a backward pass begins."""
        self._write(_BACKWARD)

    def step(self) -> None:
        """Write down that the optimizer has stepped."""
        self._write(_STEP)

    def end(self) -> None:
        """Write down that this rank needs the others no more."""
        self._write(_END)

    def wait_for_others(self) -> None:
        """Wait until the other ranks have ended, unless they never will: they do something else."""
        until = time.monotonic() + _SECONDS_FOR_OTHERS
        while time.monotonic() < until:
            calls = _read(self._folder)
            others_ended = len(calls) >= self._num_ranks and all(order.endswith(_END) for order in calls.values())
            if others_ended or disagreement(self._folder) is not None:
                return
            time.sleep(0.02)

    def _write(self, letter: str) -> None:
        with open(self._folder / f"rank_{self._rank}.calls", "a", encoding="utf-8") as file:
            file.write(letter)


def disagreement(folder: Path, *, failed: bool = False) -> tuple[int, int, str] | None:
    """Return the first rank that does something else than rank 0, in which step, and what.

    A rank may be behind. Where the run has failed, a rank that is behind one that has ended waited for it elsewhere.
    """
    calls = _read(folder)
    for rank, order in calls.items():
        first, second = sorted([(0, calls.get(0, "")), (rank, order)], key=lambda each: -len(each[1]))
        for index, (expected, seen) in enumerate(zip(first[1], second[1], strict=False)):
            if expected != seen:
                words = f"rank {second[0]} {_WORDS[seen]} where rank {first[0]} {_WORDS[expected]}"
                return rank, first[1][:index].count(_STEP) + 1, words
        if failed and first[1].endswith(_END) and len(second[1]) < len(first[1]) - 1:
            reached = len(second[1])
            words = f"rank {second[0]} waits for the others where rank {first[0]} {_WORDS[first[1][reached]]}"
            return rank, first[1][:reached].count(_STEP) + 1, words
    return None


def _read(folder: Path) -> dict[int, str]:
    files = {int(file.stem.removeprefix("rank_")): file for file in folder.glob("rank_*.calls")}
    return {rank: files[rank].read_text(encoding="utf-8") for rank in sorted(files)}
