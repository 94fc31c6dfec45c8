"""Saves that need one rank only, and the files that other ranks add to them.

[Note: who commits] If every rank holds the whole model, one rank can save it, and scripts rely on that: they call
`save_state` under `is_main_process`. So the coordinator, rank 0 or the first rank of a host, waits for no other rank
indefinitely. It announces the save in the store of the process group, writes the files that all ranks have in common
and its own generators, and commits. A rank that calls `save_state` in time writes its files into the draft, and the
coordinator commits them with its own. For that it waits briefly for as many ranks as joined its last save, at first for
all. A rank that calls later waits for the commit and then adds its files; `commit_<rank>.json`, written last, makes
them part of the checkpoint. A load derives the generators of a rank that has added none.

A rank finds the announcement of its call by the target and by the position of the run: the micro-batch, the epochs of
the loaders, the batches of those in the middle of one, and the number of saves at this position. These are the same on
every rank, even if one has fewer batches in an epoch than another.

A script may name another target on every rank: by the time of day, or by a temporary folder. So the coordinator also
announces a save by the lines of the script that called it, unless a condition there holds on one rank only. A rank
whose target nobody announces finds the save of its own lines, and adds its files to that one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...errors.callers import calling_lines
from ...runtime.group.runtime import Runtime
from ...temporary import new_folder, remove_folder
from ...untrusted import build, parse_object, require_plain_name
from ...watch.place import guard_of_caller
from ..group import LostProcessError
from ..layout import CommitRecord, iteration_of
from ..parts.states import Part
from ..storage.store import Store
from .engine import CheckpointEngine, CheckpointError, all_files, part_errors

SECONDS_TO_JOIN, SECONDS_TO_ADD = 2.0, 30.0
"""How long the coordinator waits for ranks to join a save, and for the files of those that joined."""


@dataclass(frozen=True, kw_only=True)
class SaveCall:
    """The keys by which the ranks recognise their calls of one save: the same on every rank."""

    save: str
    """The target and the position of the run."""
    lines: str
    """The lines of the script that called, and the position; empty if they are for one rank only."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint that the coordinator has opened."""

    save: str
    path: str
    """The path of the checkpoint as the coordinator sees it."""
    name: str
    token: str
    iteration: int | None


class Announcements:
    """Messages of the coordinator to the ranks that join a save, through the store of the process group."""

    def __init__(self, runtime: Runtime, *, on_each_node: bool) -> None:
        self.runtime = runtime
        self.coordinator = runtime.process_index - runtime.local_process_index if on_each_node else 0
        self.is_coordinator = runtime.process_index == self.coordinator

    def next_save(self, target: str | None, micro_batch: int, loaders: Sequence[Any]) -> SaveCall:
        """Return the keys of the save that begins now."""
        progress = [str(micro_batch), *map(_position_of, loaders)]
        if (recovery := self.runtime.recovery) is not None:  # what members that come and go have in common
            progress = [str(recovery.member.epoch), str(recovery.exchanges)]
        call = SaveCall(
            save=self._numbered([target or "automatic", *progress]), lines=self._numbered([calling_lines(), *progress])
        )
        return replace(call, lines="") if self.is_coordinator and guard_of_caller() else call

    def _numbered(self, position: list[str]) -> str:
        key = "/".join(position)
        self.runtime.saves[key] += 1
        return f"{key}/{self.runtime.saves[key]}"

    def announce_opened(self, call: SaveCall, opened: Opened) -> None:
        """Announce that a save has begun."""
        self._announce(call.save, "opened", asdict(opened))
        if call.lines:
            self._announce(call.lines, "opened", asdict(opened))

    def announce_committed(self, save: str) -> None:
        """Announce that a save is committed."""
        self._announce(save, "committed", {})

    def wait_for_files(self, save: str) -> None:
        """Wait, before the commit, until the ranks that joined a save have written their files."""
        if self.runtime.num_processes > 1:
            with suppress(dist.DistError):
                self._wait_for_count(save, "joined", self.runtime.num_savers, SECONDS_TO_JOIN)
                joined = self.runtime.num_savers = self._count(save, "joined")
                self._wait_for_count(save, "added", joined, SECONDS_TO_ADD)

    def announce_added(self, save: str) -> None:
        """Announce that this rank has written its files, or will not."""
        with suppress(dist.DistError):
            self._count(save, "added", 1)

    def _wait_for_count(self, save: str, what: str, number: int, seconds: float) -> None:
        until, member = time.monotonic() + seconds, self.runtime.member
        while self._count(save, what) < number and time.monotonic() < until:
            if member is not None and member.has_lost_one:
                return
            time.sleep(0.005)

    def _count(self, save: str, what: str, more: int = 0) -> int:
        return int(self._store.add(f"{self.coordinator}/{save}/{what}", more))

    @contextmanager
    def announcing_failure(self, save: str, lines: str = "") -> Iterator[None]:
        """Announce the error of the block, if it fails, so that no rank waits for this save."""
        try:
            yield
        except BaseException as error:
            for what in ("opened", "committed"):
                for call in filter(None, (save, lines)):
                    self._announce(call, what, {"error": f"{error}"})
            raise

    def wait_until_opened(self, call: SaveCall, store: Store, name: str | None) -> Opened:
        """Wait until the coordinator has opened this save. If it has exited, look for its commit in the store."""
        save = call.save
        try:
            self._count(save, "joined", 1)
            what = "what the coordinator has opened"
            opened = build(Opened, self._await_announcement("opened", save, call.lines), what)
            require_plain_name(opened.name, what)
            if opened.save != save:
                self._count(opened.save, "joined", 1)
            return opened
        except dist.DistError as error:
            until = (
                time.monotonic() + SECONDS_TO_JOIN
            )  # the process that hosted the process group's store may be the one that exited
            while time.monotonic() < until:
                for found in reversed(store.found()):
                    if found.record is not None and found.record.save == save and name in (None, found.name):
                        return Opened(
                            save=save,
                            path=str(store.path(found.name)),
                            name=found.name,
                            token=found.record.token,
                            iteration=iteration_of(found.name),
                        )
                time.sleep(0.02)
            raise _lost_coordinator() from error

    def wait_until_committed(self, save: str, store: Store, opened: Opened) -> None:
        """Wait until the coordinator has committed this save."""
        try:
            self._await_announcement("committed", save)
        except dist.DistError as error:
            records = [found.record for found in store.found() if found.name == opened.name]
            if not any(record is not None and record.token == opened.token for record in records):
                raise _lost_coordinator() from error

    def _announce(self, save: str, what: str, message: dict[str, Any]) -> None:
        if self.runtime.num_processes > 1:
            self._store.set(f"{self.coordinator}/{save}/{what}", json.dumps(message))

    def _await_announcement(self, what: str, *calls: str) -> dict[str, Any]:
        keys = [f"{self.coordinator}/{call}/{what}" for call in calls]
        found = self.runtime.wait_for_key(self._store, keys, self.coordinator)
        message = parse_object(found, f"{keys[0]} in the store")
        if "error" in message:
            raise CheckpointError(str(message["error"]))
        return message

    @property
    def _store(self) -> Any:
        return self.runtime.store("checkpoints")


@dataclass(kw_only=True)
class Supplement:
    """The files that one rank adds to a checkpoint of the coordinator."""

    store: Store
    save: str
    opened: Opened
    folder: Path
    part: Part
    state: Any

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return str(self.store.path(self.opened.name))

    def add(self, announcements: Announcements, engine: CheckpointEngine) -> None:
        """Add the files once the checkpoint is committed."""
        failure: Exception | None = None
        try:
            try:
                with part_errors(self.part, "could not be written"):
                    self.part.write(self.state, self.folder / self.part.file, engine.group)
                with suppress(Exception):  # a disk that is full now may have room after the commit
                    self.store.add_to_draft(self.folder, self.opened.name, self.opened.token)
            except Exception as error:
                failure = error
            finally:
                announcements.announce_added(self.save)
            announcements.wait_until_committed(self.save, self.store, self.opened)
            with engine.consensus(f"checkpoint {self.path} was committed without the files of this rank"):
                if failure is not None:
                    raise failure
                record = CommitRecord(
                    num_processes=engine.group.num_processes,
                    parts={self.part.name: self.part.file},
                    files=all_files(self.folder, {}),
                    token=self.opened.token,
                    save=self.save,
                )
                self.store.supplement(self.folder, self.opened.name, engine.group.rank, record)
        finally:
            remove_folder(self.folder.parent)


def supplement_folder(name: str) -> Path:
    """Return a local folder for the files of a supplement to a checkpoint, of the same name."""
    folder = new_folder("supplement") / name
    folder.mkdir()
    return folder


def _position_of(loader: Any) -> str:
    """Return the position of a loader, the same on every rank."""
    return f"{loader.iteration}.{loader.cursor.batches}" if loader.is_mid_epoch else f"{loader.iteration}"


def _lost_coordinator() -> LostProcessError:
    return LostProcessError(
        "Another process ended before it committed the checkpoint that this one wanted to add to. Checkpoints that "
        "were committed before are untouched."
    )
