"""Summaries of step times: per window and phase the median and the spread, in a fixed number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...runtime.phases import NAMES, Row

FEWEST_STEPS = 10
KEPT = 6
"""Windows that a rank publishes: ranks are read at different moments, and compared over the same steps."""
NUMBER, LENGTH, WHOLE = range(3)
MEDIANS = slice(3, 3 + len(NAMES))
SPREADS = slice(3 + len(NAMES), 3 + 2 * len(NAMES))
FIELDS = 3 + 2 * len(NAMES)
Table = npt.NDArray[np.float64]


class Windows:
    """The newest windows of one rank."""

    def __init__(self) -> None:
        self.length = FEWEST_STEPS
        self._rows: list[list[float]] = []
        self._number = -1
        self._newest: deque[Table] = deque([np.zeros(FIELDS)] * KEPT, maxlen=KEPT)

    @property
    def newest(self) -> Table:
        """The window that was closed last; zeros before the first."""
        return self._newest[-1]

    def resize(self, length: int) -> None:
        """Change the number of steps per window from now on."""
        if length != self.length:
            self.length, self._number, self._rows = length, -1, []

    def consume(self, rows: deque[Row]) -> bool:
        """Consume measured steps, and return whether they completed a window."""
        closed = False
        while rows:
            step, seconds = rows.popleft()
            if step // self.length != self._number:
                self._number, self._rows = step // self.length, []
            self._rows.append(seconds)
            if len(self._rows) == self.length:  # a window that was entered in its middle never completes
                self._newest.append(summary(self._number, self._rows))
                closed = True
        return closed

    def pack(self) -> bytes:
        """Serialize the newest windows for the store."""
        return np.stack(tuple(self._newest)).astype("<f8").tobytes()


def summary(number: int, rows: Sequence[list[float]]) -> Table:
    """Summarize the steps of a window."""
    seconds = np.array(rows)
    medians = np.median(seconds, axis=0)
    spreads = np.median(np.abs(seconds - medians), axis=0)
    return np.concatenate([[number, len(rows), np.median(seconds.sum(axis=1))], medians, spreads])


def unpack(packed: Iterable[bytes]) -> Table:
    """Deserialize the windows of all ranks: rank x window x field."""
    return np.frombuffer(b"".join(packed), dtype="<f8").reshape(-1, KEPT, FIELDS)
