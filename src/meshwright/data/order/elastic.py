"""Assign the samples of an epoch to members that come and go, so that each is trained on exactly once.

[Note: elastic epochs] A window is what one optimizer step consumes: `rounds_per_window` rounds of `replicas * share`
positions. What is left of a window is one array of positions, in order. With S members present it is cut into the
fewest micro-batches of S slices that have at most `share` positions each, as evenly as possible. With all replicas
present these are the slices of a run whose members stay. Members that are lost return the positions they took since the
last step, and the window is divided again from there; the step therefore has the same samples as with all replicas.
Everything is computed from the members and from what was taken, so members that made the same calls have the same
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .orders import Positions


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """What the members do at the same time: a slice of positions for each of them."""

    members: tuple[int, ...]
    positions: Positions
    """All positions that were left of the window when it was assigned."""
    number: int
    """Which micro-batch of these positions this is."""
    of: int
    """The number of micro-batches that these positions make."""
    next_round: int
    """The first round after the window."""

    @property
    def closes(self) -> bool:
        """Return whether it is the last of its window, as far as it was assigned."""
        return self.number == self.of - 1

    def is_full(self, share: int) -> bool:
        """Return whether every slice has as many positions as a share."""
        return len(self.positions) == self.of * len(self.members) * share

    def slice_of(self, member: int) -> Positions:
        """Return the positions of a member; may be empty."""
        first = self.number * len(self.members) + self.members.index(member)
        return self.positions[self._bound(first) : self._bound(first + 1)]

    def read_by(self, member: int) -> Positions:
        """Return the positions that a member reads: its slice, or one position with weight 0 in place of nothing."""
        own = self.slice_of(member)
        return own if len(own) else self.positions[:1]

    @property
    def rest(self) -> Positions:
        """Return the positions of the window that come after this micro-batch."""
        return self.positions[self._bound((self.number + 1) * len(self.members)) :]

    def _bound(self, chunk: int) -> int:
        """Return where a chunk begins if the positions are cut into chunks whose lengths differ by one at most."""
        length, longer = divmod(len(self.positions), self.of * len(self.members))
        return chunk * length + min(chunk, longer)


class ElasticEpoch:
    """Assign the positions of one epoch to members. See [Note: elastic epochs].

    Positions from `total` on are padding of the last round: they stand for the first samples of the order.

    Args:
        replicas: The nominal number of members.
        share: Positions of a member in a round of all replicas.
        total: The number of samples in the epoch.
        start: The first position that is assigned.
        rounds: The number of rounds from there on.
        rounds_per_window: Rounds that one optimizer step consumes.
        members: The members present, by nominal rank.
    """

    def __init__(
        self,
        *,
        replicas: int,
        share: int,
        total: int,
        start: int,
        rounds: int,
        rounds_per_window: int,
        members: Iterable[int],
    ) -> None:
        self.share = share
        self.total = total
        self.rounds = rounds
        self.members = tuple(sorted(members))
        self.committed_rounds = 0
        """Rounds of which every position was in a step."""
        self._start = start
        self._round_size = replicas * share
        self._rounds_per_window = rounds_per_window
        self._next_round = 0
        """The first round after the open window."""
        self._rest: Positions = np.empty(0, dtype=np.int64)
        """Positions of the open window that are not taken."""
        self._taken: list[tuple[MicroBatch, tuple[int, ...]]] = []
        """The micro-batches since the last step, and the members whose slices of them count."""

    @property
    def closes(self) -> bool:
        """Return whether the micro-batch that was taken last is the last of its window."""
        return not len(self._rest)

    @property
    def begins(self) -> bool:
        """Return whether the micro-batch that was taken last is the first since the last step."""
        return len(self._taken) == 1

    @property
    def ended(self) -> bool:
        """Return whether everything was taken."""
        return self.closes and self._next_round >= self.rounds

    @property
    def at_boundary(self) -> bool:
        """Return whether no window is open: the last one was committed, the next one not begun."""
        return self.closes and not self._taken

    def stream(self) -> Iterator[MicroBatch]:
        """Yield what comes next for the present members. Nothing is taken by that."""
        rest, next_round = self._rest, self._next_round
        while True:
            if not len(rest):
                if next_round >= self.rounds:
                    return
                rest, next_round = self._window(next_round)
            of = -(-len(rest) // (len(self.members) * self.share))
            for number in range(of):
                yield MicroBatch(members=self.members, positions=rest, number=number, of=of, next_round=next_round)
            rest = rest[:0]

    def take(self, micro_batch: MicroBatch) -> None:
        """Record that the training loop got a micro-batch, the next one of `stream`."""
        self._taken.append((micro_batch, micro_batch.members))
        self._rest = micro_batch.rest
        self._next_round = micro_batch.next_round

    def commit(self) -> None:
        """Record that the step was made of what was taken."""
        self._taken.clear()
        if self.closes:
            self.committed_rounds = min(self._next_round, self.rounds)

    def change_members(self, members: Iterable[int]) -> None:
        """From now on divide what is left, and what lost members took since the last step, among these members.

        Every remaining member must have taken the same micro-batches since the last step. New members begin at a
        boundary of windows.
        """
        present = tuple(sorted(members))
        lost = set(self.members) - set(present)
        returned = [batch.slice_of(member) for batch, counted in self._taken for member in counted if member in lost]
        self._rest = np.sort(np.concatenate([self._rest, *returned]))
        self._taken = [(batch, tuple(m for m in counted if m not in lost)) for batch, counted in self._taken]
        self.members = present

    def _window(self, first_round: int) -> tuple[Positions, int]:
        """Return the positions of a window, and the round after it."""
        next_round = min(first_round + self._rounds_per_window, self.rounds)
        first, end = (self._start + number * self._round_size for number in (first_round, next_round))
        return np.arange(first, end), next_round
