"""Saves that need one rank only, and what the other ranks add to them.

[Note: who commits] Where every rank holds the whole model, one rank can save it alone, and scripts do: they call
`save_state` under `is_main_process`. So the coordinator, rank 0 or the first rank of a host, waits for nobody. It
announces the save at the store, writes what all ranks have in common and its own generators, and commits. A rank that
calls `save_state` in time writes its files into the draft, and the coordinator commits them with its own: it gives the
others a moment to come, as many as came to its last save, at first all. A rank that comes later waits for the commit
and then adds its files to it; `commit_<rank>.json`, written last, makes them part of the checkpoint. A load derives the
generators of a rank that has added none.

A rank finds the announcement of its own call by the target and by where the run is: the micro-batch, the epochs of the
loaders, the batches of those in the middle of one, and how often a save was called there. These are the same on every
rank, also where one has fewer batches in an epoch than another.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...runtime.group.runtime import Runtime
from ..group import LostProcessError
from ..layout import CommitRecord, iteration_of
from ..parts.states import Part
from ..storage.store import Store
from .engine import CheckpointEngine, CheckpointError, all_files, naming

SECONDS_TO_COME, SECONDS_TO_ADD = 2.0, 30.0
"""How long the coordinator waits for ranks that came to the last save, and for those that have come."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint that the coordinator writes."""

    name: str
    token: str
    iteration: int | None


class Announcements:
    """What the coordinator of a save tells the ranks that come to it, through the process group's store."""

    def __init__(self, runtime: Runtime, *, on_each_node: bool) -> None:
        self.runtime = runtime
        self.coordinator = runtime.process_index - runtime.local_process_index if on_each_node else 0
        self.is_coordinator = runtime.process_index == self.coordinator

    def next_save(self, target: str | None, micro_batch: int, loaders: Sequence[Any]) -> str:
        """Name the save that begins now, the same on every rank."""
        place = "/".join([target or "automatic", str(micro_batch), *map(_place_of, loaders)])
        self.runtime.saves[place] += 1
        return f"{place}/{self.runtime.saves[place]}"

    def tell_opened(self, save: str, opened: Opened) -> None:
        """Announce that a save has begun."""
        self._tell(save, "opened", asdict(opened))

    def tell_committed(self, save: str) -> None:
        """Announce that a save is committed."""
        self._tell(save, "committed", {})

    def wait_for_files(self, save: str) -> None:
        """Wait until the ranks that come to a save have written their files, before it is committed."""
        if self.runtime.num_processes > 1:
            with suppress(dist.DistError):
                self._wait_for_count(save, "came", self.runtime.num_savers, SECONDS_TO_COME)
                came = self.runtime.num_savers = self._count(save, "came")
                self._wait_for_count(save, "added", came, SECONDS_TO_ADD)

    def tell_added(self, save: str) -> None:
        """Announce that this rank has written its files, or will not."""
        with suppress(dist.DistError):
            self._count(save, "added", 1)

    def _wait_for_count(self, save: str, what: str, number: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._count(save, what) < number and time.monotonic() < until:
            time.sleep(0.005)

    def _count(self, save: str, what: str, more: int = 0) -> int:
        return int(self._store.add(f"{self.coordinator}/{save}/{what}", more))

    @contextmanager
    def telling_failure(self, save: str) -> Iterator[None]:
        """Announce why the block fails, if it does, so that nobody waits for this save."""
        try:
            yield
        except BaseException as error:
            for what in ("opened", "committed"):
                self._tell(save, what, {"error": f"{error}"})
            raise

    def wait_until_opened(self, save: str, store: Store, name: str | None) -> Opened:
        """Wait until the coordinator has come to this save. One that has left has left its commit on the disk."""
        try:
            self._count(save, "came", 1)
            return Opened(**self._heard(save, "opened"))
        except dist.DistError as error:
            until = time.monotonic() + SECONDS_TO_COME  # the launcher may have kept the store, and be gone
            while time.monotonic() < until:
                for found in reversed(store.found()):
                    if found.record is not None and found.record.save == save and name in (None, found.name):
                        return Opened(name=found.name, token=found.record.token, iteration=iteration_of(found.name))
                time.sleep(0.02)
            raise _lost() from error

    def wait_until_committed(self, save: str, store: Store, opened: Opened) -> None:
        """Wait until the coordinator has committed this save."""
        try:
            self._heard(save, "committed")
        except dist.DistError as error:
            records = [found.record for found in store.found() if found.name == opened.name]
            if not any(record is not None and record.token == opened.token for record in records):
                raise _lost() from error

    def _tell(self, save: str, what: str, note: dict[str, Any]) -> None:
        if self.runtime.num_processes > 1:
            self._store.set(f"{self.coordinator}/{save}/{what}", json.dumps(note))

    def _heard(self, save: str, what: str) -> dict[str, Any]:
        note: dict[str, Any] = json.loads(self.runtime.wait_for_key(self._store, f"{self.coordinator}/{save}/{what}"))
        if "error" in note:
            raise CheckpointError(note["error"])
        return note

    @property
    def _store(self) -> Any:
        return self.runtime.store("checkpoints")


@dataclass(kw_only=True)
class Supplement:
    """The files of one rank that go into a checkpoint which the coordinator commits."""

    store: Store
    save: str
    opened: Opened
    folder: Path
    part: Part
    state: Any

    @property
    def path(self) -> str:
        """Where the checkpoint will be."""
        return str(self.store.path(self.opened.name))

    def add(self, announcements: Announcements, engine: CheckpointEngine) -> None:
        """Add the files once the checkpoint is committed."""
        failure: Exception | None = None
        try:
            try:
                with naming(self.part, "could not be written"):
                    self.part.write(self.state, self.folder / self.part.file, engine.crew)
                with suppress(Exception):  # a disk that is full now may have room after the commit
                    self.store.deliver(self.folder, self.opened.name, self.opened.token)
            except Exception as error:
                failure = error
            finally:
                announcements.tell_added(self.save)
            announcements.wait_until_committed(self.save, self.store, self.opened)
            with engine.together(f"checkpoint {self.path} was committed without the files of this rank"):
                if failure is not None:
                    raise failure
                record = CommitRecord(
                    num_processes=engine.crew.num_processes,
                    parts={self.part.name: self.part.file},
                    files=all_files(self.folder, {}),
                    token=self.opened.token,
                    save=self.save,
                )
                self.store.supplement(self.folder, self.opened.name, engine.crew.rank, record)
        finally:
            self.store.discard(self.folder)


def supplement_folder() -> Path:
    """Return a folder of this machine for the files of a supplement."""
    return Path(tempfile.mkdtemp(prefix="accelerate_"))


def _place_of(loader: Any) -> str:
    """Say where a loader is, the same on every rank."""
    return f"{loader.iteration}.{loader.cursor.batches}" if loader.is_mid_epoch else f"{loader.iteration}"


def _lost() -> LostProcessError:
    return LostProcessError(
        "Another process ended before it committed the checkpoint that this one wanted to add to. Checkpoints that "
        "were committed before are untouched."
    )
