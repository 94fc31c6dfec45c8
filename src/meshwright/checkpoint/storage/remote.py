"""Checkpoints behind any fsspec URL. Nothing is renamed there: writing the record, last and atomically, is the commit.

A checkpoint `<name>` has its files in `<name>/data-<token>/`, and `<name>/commit.json` names the token.
Replacing one writes another `data-` folder and then the record over the old record: a reader sees the old or the new.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import InvalidDataError
from ...temporary import new_folder, remove_folder
from ...untrusted import MOST_BYTES
from ..layout import COMMIT_FILE, CommitRecord, iteration_of, supplement_file
from .store import Found, added_only, taken_error


class RemoteStore:
    """Checkpoints under one URL."""

    is_shared = False
    """Each process writes into its own local folder and uploads it."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        import fsspec

        self.url = url.rstrip("/")
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) and not options else options
        self.fs, self.root = fsspec.core.url_to_fs(self.url, **(options or {}))
        self.root = self.root.rstrip("/")
        self.fs.invalidate_cache()

    def naming(self) -> AbstractContextManager[object]:
        """Do nothing: object stores have no locks. Of two runs that choose one name, the later commit fails."""
        return nullcontext()

    def draft(self, name: str, token: str) -> Path:
        """Return a local folder, from which files are uploaded."""
        draft = new_folder("upload") / name
        draft.mkdir()
        return draft

    def publish(self, draft: Path, name: str, token: str) -> None:
        """Upload the files of this process."""
        for path in sorted(draft.rglob("*")):
            if path.is_file():
                self.fs.put_file(str(path), f"{self.root}/{name}/data-{token}/{path.relative_to(draft).as_posix()}")

    def commit(self, draft: Path, name: str, token: str, record: CommitRecord) -> None:
        """Write the record, which makes the new checkpoint the current one."""
        record = replace(record, folder=f"data-{token}")
        self._check_sizes(name, record)
        if record.iteration is not None and self.exists(name):
            raise taken_error(self.path(name))
        self.fs.pipe_file(f"{self.root}/{name}/{COMMIT_FILE}", record.to_json().encode())
        self.clean_up(name)

    def add_to_draft(self, draft: Path, name: str, token: str) -> None:
        """Do nothing: the record lists the files of the coordinator, and others are added after the commit."""

    def supplement(self, draft: Path, name: str, rank: int, record: CommitRecord) -> None:
        """Upload the files to the folder of the checkpoint, then the record."""
        committed = self._record(name)[0]
        record = added_only(record, committed)
        if committed is None or not record.files:
            return
        folder = f"{self.root}/{name}/{committed.folder}"
        for file in record.files:
            self.fs.put_file(str(draft / file), f"{folder}/{file}")
        self.fs.pipe_file(f"{folder}/{supplement_file(rank)}", record.to_json().encode())

    def discard(self, draft: Path) -> None:
        """Delete a draft; the next save deletes what was uploaded."""
        remove_folder(draft.parent)

    def _check_sizes(self, name: str, record: CommitRecord) -> None:
        for file, facts in record.files.items():
            size = self.fs.info(f"{self.root}/{name}/{record.folder}/{file}")["size"]
            if size not in (facts.size, None):  # some servers do not say it
                raise OSError(f"{file} has {size} bytes at {self.path(name)} instead of {facts.size}: it is not whole")

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its record first."""
        self.fs.rm_file(f"{self.root}/{name}/{COMMIT_FILE}")
        self.fs.rm(f"{self.root}/{name}", recursive=True)

    def recover(self, name: str | None) -> None:
        """Do nothing: a commit cannot be interrupted."""

    def clean_up(self, name: str | None) -> None:
        """Delete files without a record: those of an interrupted save, or of a replaced checkpoint."""
        self.fs.invalidate_cache()
        for own_name in [name] if name is not None else [n for n in self._names() if iteration_of(n) is not None]:
            record, problem = self._record(own_name)
            if problem is not None:
                continue  # it may be a checkpoint of a newer version
            for folder in self._entries(f"{self.root}/{own_name}"):
                last = folder.rsplit("/", 1)[-1]
                if last.startswith("data-") and (record is None or last != record.folder):
                    self.fs.rm(folder, recursive=True)

    def path(self, name: str) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.url}/{name}"

    def exists(self, name: str) -> bool:
        """Tell whether there is a committed checkpoint of this name."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(f"{self.root}/{name}/{COMMIT_FILE}"))

    def is_taken(self, name: str) -> bool:
        """Tell whether there is a record or a file of this name; a save that was interrupted has neither."""
        return self.exists(name) or bool(self.fs.isfile(f"{self.root}/{name}"))

    def fetch(self, name: str, wanted: Callable[[str], bool], rank: int) -> Path:
        """Download the wanted files, and return their local folder."""
        record, problem = self._record(name)
        if record is None:
            raise FileNotFoundError(problem or f"there is no committed checkpoint at {self.path(name)}")
        folder = new_folder("download") / name
        folder.mkdir()
        (folder / COMMIT_FILE).write_text(replace(record, folder="").to_json(), encoding="utf-8")
        try:
            self._download(name, record, folder, wanted, supplement_file(rank))
        except BaseException:
            self.release(folder)
            raise
        return folder

    def _download(
        self, name: str, record: CommitRecord, folder: Path, wanted: Callable[[str], bool], added: str
    ) -> None:
        files = {file: facts for file, facts in record.files.items() if wanted(file)}
        if self.fs.exists(f"{self.root}/{name}/{record.folder}/{added}"):
            content = self._read(f"{self.root}/{name}/{record.folder}/{added}")
            (folder / added).write_bytes(content)
            files |= CommitRecord.from_json(content, added).files
        # Before a byte is on the disk of this machine: the files may be others than those that were committed.
        self._check_sizes(name, replace(record, files=files))
        for file in files:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(f"{self.root}/{name}/{record.folder}/{file}", str(target))

    def release(self, folder: Path) -> None:
        """Delete what was downloaded."""
        remove_folder(folder.parent)

    def found(self) -> list[Found]:
        """Return all checkpoints, the oldest first, including unfinished and damaged ones."""
        everything = []
        for name in self._names():
            record, problem = self._record(name)
            if record is None and problem is None:
                problem = "it was not finished"
            everything.append(
                Found(name=name, record=record, changed=record.time if record is not None else 0.0, problem=problem)
            )
        return sorted(everything, key=lambda item: item.changed)

    def _names(self) -> list[str]:
        return [entry.rsplit("/", 1)[-1] for entry in self._entries(self.root)]

    def _entries(self, folder: str) -> list[str]:
        try:
            return [
                entry["name"].rstrip("/") for entry in self.fs.ls(folder, detail=True) if entry["type"] == "directory"
            ]
        except FileNotFoundError:
            return []

    def _record(self, name: str) -> tuple[CommitRecord | None, str | None]:
        try:
            return CommitRecord.from_json(self._read(f"{self.root}/{name}/{COMMIT_FILE}")), None
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError) as error:
            return None, str(error)

    def _read(self, file: str) -> bytes:
        """Return the contents of a record."""
        found = self.fs.info(file)
        if found["type"] != "file" or (found["size"] or 0) > MOST_BYTES:
            raise InvalidDataError(f"{COMMIT_FILE} is not a file of at most {MOST_BYTES:,} bytes")
        if found["size"] is not None:
            return bytes(self.fs.cat_file(file))
        with self.fs.open(file, "rb") as stream:
            content = bytes(stream.read(MOST_BYTES + 1))
        if len(content) > MOST_BYTES:
            raise InvalidDataError(f"{COMMIT_FILE} is larger than {MOST_BYTES:,} bytes")
        return content
