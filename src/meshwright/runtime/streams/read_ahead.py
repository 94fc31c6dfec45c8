"""Load the next of several items while one is in use, in the order of their last use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar
from weakref import finalize

import torch

from ..devices.device import activate

Item = TypeVar("Item", bound=Hashable)
Loaded = TypeVar("Loaded")


class ReadAhead(Generic[Item, Loaded]):
    """Items in the order of their use, of which a thread loads one ahead."""

    def __init__(self, discard: Callable[[Item], None] | None = None) -> None:
        """Make one without items; `discard` is called with an item that was loaded in vain."""
        self._discard = discard
        self._next_items: dict[Item, Item] = {}
        self._last_added: Item | None = None
        self._last_used: Item | None = None
        self._prefetched: tuple[Item, Future[Loaded]] | None = None
        self._lock = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def add(self, item: Item) -> None:
        """Append an item to the expected order."""
        if self._last_added is not None:
            self._next_items[self._last_added] = item
        self._last_added = item

    def next_of(self, item: Item) -> Item | None:
        """Return the item that came after this one the last time, or is expected to."""
        return self._next_items.get(item)

    def take(self, item: Item) -> Loaded | None:
        """Return what was loaded ahead for an item that is used now, or None if it was not."""
        with self._lock:
            prefetched, self._prefetched = self._prefetched if self._process == os.getpid() else None, None
            if self._last_used is not None and self._last_used != item:
                self._next_items[self._last_used] = item
            self._last_used = item
        if prefetched is not None and prefetched[0] == item:
            return prefetched[1].result()
        self._give_up(prefetched)
        return None

    def restart(self) -> None:
        """Begin a new pass: what is used next is not what follows the last item, and nothing is loaded ahead."""
        with self._lock:
            prefetched, self._prefetched = self._prefetched if self._process == os.getpid() else None, None
            self._last_used = None
        self._give_up(prefetched)

    def _give_up(self, prefetched: tuple[Item, Future[Loaded]] | None) -> None:
        if prefetched is not None:
            item, loading = prefetched
            if not loading.cancel() and loading.exception() is None and self._discard is not None:
                self._discard(item)

    def start(self, item: Item, load: Callable[[], Loaded], device: torch.device) -> None:
        """Load an item by the thread, unless one is loaded ahead already."""
        with self._lock:
            if self._prefetched is None:
                self._prefetched = item, self._thread(device).submit(load)

    def _thread(self, device: torch.device) -> ThreadPoolExecutor:
        if self._reader is None or self._process != os.getpid():  # a forked process has no threads
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=activate, initargs=(device,))
            self._process = os.getpid()
            finalize(self, self._reader.shutdown, wait=False)
        return self._reader
