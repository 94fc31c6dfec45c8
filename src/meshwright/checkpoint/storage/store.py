"""Storage for checkpoints. A store manages folders and names; the engine manages their contents."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ...temporary import Hold, is_held, locked
from ..formats.saving import atomic_write, flush
from ..layout import (
    COMMIT_FILE,
    PROGRESS_FILE,
    CommitRecord,
    is_published,
    iteration_of,
    random_states_file,
    supplement_file,
    unfinished,
    unfinished_name,
)

SECONDS_TO_NAME = 10.0
"""How long a save waits for other runs to choose the names of theirs. Whoever can read the folder can lock it."""
_REASONS = {"partial": "it was not finished", "removed": "it is being deleted", "replaced": "it was replaced"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder that is a checkpoint, committed or not."""

    name: str
    record: CommitRecord | None
    """None for a folder of accelerate 1.x, which keeps no record."""
    changed: float
    problem: str | None = None
    """Why it cannot be loaded."""


class Store(Protocol):
    """The interface between the engine and a storage backend."""

    is_shared: bool
    """All ranks write into one folder; otherwise each has its own, which is published."""

    def naming(self) -> AbstractContextManager[object]:
        """Let one run at a time look for a free name and make the draft that takes it."""

    def draft(self, name: str, token: str) -> Path:
        """Return a local folder into which a checkpoint is written."""

    def publish(self, draft: Path, name: str, token: str) -> None:
        """Make the files of this process visible to all, still uncommitted."""

    def commit(self, draft: Path, name: str, token: str, record: CommitRecord) -> None:
        """Make the draft the checkpoint of this name, atomically; an automatic one replaces none of another run."""

    def add_to_draft(self, draft: Path, name: str, token: str) -> None:
        """Add the files of this rank to the draft of another, if it is not committed yet."""

    def supplement(self, draft: Path, name: str, rank: int, record: CommitRecord) -> None:
        """Add the files of one rank to a committed checkpoint, and their record last; to no other save of that name."""

    def discard(self, draft: Path) -> None:
        """Delete a draft."""

    def recover(self, name: str | None) -> None:
        """Complete interrupted commits of one name, or of the automatic names; delete nothing."""

    def clean_up(self, name: str | None) -> None:
        """Complete interrupted commits of one name, or of the automatic names, and delete leftovers."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint; it stops being one before its files are deleted."""

    def path(self, name: str) -> str | Path:
        """Return the path of a checkpoint."""

    def exists(self, name: str) -> bool:
        """Tell whether there is a checkpoint to load."""

    def is_taken(self, name: str) -> bool:
        """Tell whether there is anything of this name, which a new checkpoint would replace, or a draft of it."""

    def fetch(self, name: str, wanted: Callable[[str], bool], rank: int) -> Path:
        """Return a local folder with the wanted files, those that this rank has added, and the records."""

    def release(self, folder: Path) -> None:
        """Release the folder that `fetch` returned."""

    def found(self) -> list[Found]:
        """Return all checkpoints, committed or not, the oldest first."""


class LocalStore:
    """Checkpoints as subfolders of a folder on a disk. See [Note: commit] in layout.py."""

    is_shared = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._hold: Hold | None = None
        """Marks the draft as in use: another run that saves into this folder deletes only those of nobody."""

    def naming(self) -> AbstractContextManager[object]:
        """Lock the folder, where the file system has locks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return locked(self.folder, SECONDS_TO_NAME)

    def draft(self, name: str, token: str) -> Path:
        """Return the folder; create it if necessary."""
        self._check_replaceable(self.folder / name)
        draft = self._draft(name, token)
        draft.mkdir(parents=True, exist_ok=True)
        self._release_draft()
        self._hold = Hold(draft.parent)
        return draft

    def _draft(self, name: str, token: str) -> Path:
        return self.folder / unfinished_name(name, "partial", token) / name

    def _release_draft(self) -> None:
        if self._hold is not None:
            self._hold.release()

    def publish(self, draft: Path, name: str, token: str) -> None:
        """Do nothing: all processes see the folder."""

    def discard(self, draft: Path) -> None:
        """Delete a draft; under another name, because another rank may be writing into it."""
        self._release_draft()
        folder = draft.parent
        with suppress(OSError):
            folder = folder.rename(folder.with_name(folder.name.replace(".partial-", ".removed-")))
        _delete(folder)

    def exists(self, name: str) -> bool:
        """Tell whether there is a folder of this name."""
        return (self.folder / name).is_dir()

    def is_taken(self, name: str) -> bool:
        """Tell whether there is a folder, a file or a link of this name, or a draft: drafts become folders."""
        drafts = any(unfinished(path.name) == (name, "partial") for path in self._folders())
        return drafts or os.path.lexists(self.folder / name)

    def fetch(self, name: str, wanted: Callable[[str], bool], rank: int) -> Path:
        """Return the checkpoint's own folder."""
        return self.folder / name

    def release(self, folder: Path) -> None:
        """Do nothing: it is the checkpoint itself."""

    def commit(self, draft: Path, name: str, token: str, record: CommitRecord) -> None:
        """Write the record into a finished draft and rename it, replacing an older checkpoint if there is one."""
        target, aside = self.folder / name, None
        try:
            self._write_record(draft / COMMIT_FILE, record)
            flush(draft)
            if record.iteration is None and target.exists() and draft.exists():
                aside = self._renamed_path(name, "replaced")
                target.rename(aside)
            draft.rename(target)
        except OSError as error:
            there = self._record(target)[0]
            if draft.exists() or there is None or there.token != record.token:
                if aside is not None:
                    aside.rename(target)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise taken_error(target) from error
                raise
            flush(target / COMMIT_FILE)  # `recover` of another process has renamed it
            flush(target)
        self._remove_emptied(draft.parent)
        flush(self.folder)
        self._release_draft()
        if aside is not None:
            self._delete_replaced(aside, name)

    def _write_record(self, file: Path, record: CommitRecord) -> None:
        try:
            file.write_text(record.to_json(), encoding="utf-8")
        except OSError as error:
            error.filename = str(file)  # a full disk does not name it
            raise
        flush(file)

    def add_to_draft(self, draft: Path, name: str, token: str) -> None:
        """Copy the files that are missing, each atomically."""
        target = self._draft(name, token)
        with suppress(FileNotFoundError):  # it is committed already
            for path in sorted(draft.rglob("*")):
                file = path.relative_to(draft)
                if path.is_dir():
                    (target / file).mkdir(exist_ok=True)
                elif not (target / file).exists():
                    with atomic_write(target / file) as partial:
                        shutil.copyfile(path, partial)

    def supplement(self, draft: Path, name: str, rank: int, record: CommitRecord) -> None:
        """Copy the files, each atomically, then the record."""
        folder = self.folder / name
        record = added_only(record, self._record(folder)[0])
        try:
            for file in record.files:
                for parent in reversed(Path(file).parents[:-1]):
                    (folder / parent).mkdir(exist_ok=True)
                with atomic_write(folder / file) as partial:
                    shutil.copyfile(draft / file, partial)
            if record.files:
                with atomic_write(folder / supplement_file(rank)) as partial:
                    partial.write_text(record.to_json(), encoding="utf-8")
                flush(folder)
        except FileNotFoundError:
            if folder.exists():  # otherwise the run has deleted it by its total_limit
                raise

    def remove(self, name: str) -> None:
        """Delete a checkpoint; it is renamed first, so that it is never incomplete."""
        aside = self._renamed_path(name, "removed")
        (self.folder / name).rename(aside)
        _delete(aside)

    def recover(self, name: str | None) -> None:
        """Rename a draft that has its record, or else restore the checkpoint that it was to replace.

        Nothing is deleted, because a load must not disturb a process that saves.
        """
        for wanted in ("partial", "replaced"):
            for path, own_name, state in self._unfinished(name):
                target = self.folder / own_name
                contents = path / own_name if state == "partial" else path
                if state == wanted and not target.exists() and (state == "replaced" or self._record(contents)[0]):
                    with suppress(OSError):  # another process renamed it, or it is another user's
                        contents.rename(target)
                        if contents != path:
                            self._remove_emptied(path)

    def clean_up(self, name: str | None) -> None:
        """Complete interrupted commits, and delete leftovers.

        Only folders of one name, or of the automatic names, are touched, and no draft that a process is writing: other
        runs may use this folder.
        """
        self.recover(name)
        for path, own_name, state in self._unfinished(name):
            if state == "replaced":
                self._delete_replaced(path, own_name)
            elif not is_held(path):
                _delete(path)

    def _unfinished(self, name: str | None) -> list[tuple[Path, str, str]]:
        found = [(path, unfinished(path.name)) for path in self._folders()]
        return [
            (path, *parts)
            for path, parts in found
            if parts is not None and (iteration_of(parts[0]) is not None if name is None else parts[0] == name)
        ]

    def _remove_emptied(self, folder: Path) -> None:
        """Remove the folder around a committed draft; what hooks wrote beside the draft moves beside the checkpoint."""
        with suppress(OSError):  # another process removes it, too
            for path in folder.iterdir():
                path.replace(self.folder / path.name)
            folder.rmdir()

    def _delete_replaced(self, replaced: Path, name: str) -> None:
        """Delete a checkpoint that was replaced; other files in its folder move to the new one."""
        record = self._record(replaced)[0]
        own = {file.split("/")[0] for file in record.files} if record is not None else set()
        with suppress(OSError):  # the new one is committed: the next save tries again
            for path in [] if replaced.is_symlink() else replaced.iterdir():
                target = self.folder / name / path.name
                is_checkpoint_file = path.name in own or is_published(path.name) or ".partial-" in path.name
                if not is_checkpoint_file and not target.exists():
                    path.rename(target)
            aside = self._renamed_path(name, "removed")
            replaced.rename(aside)
            _delete(aside)

    def _check_replaceable(self, target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file: name a folder")
        here = Path.cwd()
        if target.is_mount() or target == here or target in here.parents:
            what = "a mount point" if target.is_mount() else "where this process is running"
            raise ValueError(
                f"{target} is {what}, so it cannot be replaced by a rename: save into a folder inside it, "
                f"such as {target / 'checkpoint'}"
            )

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / name

    def found(self) -> list[Found]:
        """Return all checkpoints of the folder, committed or not, the oldest first."""
        everything: list[Found] = []
        for path in self._folders():
            on_its_way = unfinished(path.name)
            is_draft = on_its_way is not None and on_its_way[1] == "partial"
            record, problem = self._record(path / on_its_way[0] if on_its_way is not None and is_draft else path)
            if on_its_way is not None:
                problem = _REASONS[on_its_way[1]]
            elif record is None and problem is None and not is_written_by_1x(path):
                problem = f"it has no {COMMIT_FILE}"
            with suppress(FileNotFoundError):  # another process may be deleting it
                changed = record.time if record is not None else path.stat().st_mtime
                everything.append(Found(name=path.name, record=record, changed=changed, problem=problem))
        return sorted(everything, key=lambda item: item.changed)

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def _record(self, path: Path) -> tuple[CommitRecord | None, str | None]:
        try:
            return CommitRecord.read(path / COMMIT_FILE), None
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError) as error:
            return None, str(error)

    def _renamed_path(self, name: str, state: str) -> Path:
        return self.folder / unfinished_name(name, state, uuid.uuid4().hex[:8])


def taken_error(target: str | os.PathLike[str]) -> OSError:
    """Return the error for an automatic name that another run has used first, where nothing could lock it."""
    reason = "Another run has made a checkpoint of this name in the meantime: give each run a project_dir of its own"
    return FileExistsError(errno.EEXIST, reason, os.fspath(target))


def added_only(record: CommitRecord, committed: CommitRecord | None) -> CommitRecord:
    """Remove the files that are part of the commit already; all of them if the commit is of another save."""
    if committed is None or committed.token != record.token:
        return replace(record, files={})
    return replace(record, files={file: facts for file, facts in record.files.items() if file not in committed.files})


def _delete(folder: Path) -> None:
    """Delete a folder as far as possible; of a link, the link only."""
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def is_written_by_1x(folder: Path) -> bool:
    """Tell whether a folder without a record is a checkpoint of accelerate 1.x, which writes none."""
    try:
        return (folder / random_states_file(0)).is_file() and not (folder / PROGRESS_FILE).exists()
    except PermissionError:
        return False
