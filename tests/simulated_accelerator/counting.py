"""Count what a block asks of the device: kernels, copies, waits, streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .build import extension

_WAITS = ("sync", "blocking copy to device", "blocking copy to host")


class Counts(Counter[str]):
    """How often each thing was asked for."""

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return sum(self[name] for name in _WAITS)

    @property
    def queries_by_thread(self) -> dict[int, int]:
        """How often each thread asked whether an event has passed."""
        found = {name.partition("@")[2]: number for name, number in self.items() if name.startswith("cudaEventQuery@")}
        return {int(thread): number for thread, number in found.items()}


@contextmanager
def counted() -> Iterator[Counts]:
    """Yield the counts of the block; they are there when it has ended."""
    found = Counts()
    before = Counter(dict(extension().counted_calls()))
    try:
        yield found
    finally:
        after = Counter(dict(extension().counted_calls()))
        found.update(after - before)
