"""Copies of a run's state as files in host memory, which outlive its processes.

[Note: two slots] Every rank writes into its own files, each of which has two slots. A copy goes into the slot of the
older one: its record is deleted, the file is written, and a new record appears when it is complete. So a kill at any
moment leaves the other slot. That slot is of the same step on all ranks, without any message between them: nobody
begins copy n before everybody has completed copy n - 1, because it is awaited one step earlier than copy n begins, and
an optimizer step needs all ranks. `MemoryCopies` sees to that.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...untrusted import build, parse_json, read_bytes
from ..layout import FileFacts

STATE, GENERATORS = "state", "generators"
SLOTS = ("a", "b")
_NEARLY_FULL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """One complete file of a copy."""

    kind: str
    """STATE: models, optimizers and all that replicas have in common. GENERATORS: what each rank has for itself."""
    owner: int
    """Of a state, the first rank of those that have the same one; of generators, their rank."""
    step: int
    num_processes: int
    size: int
    checksum: str
    slot: str

    def __post_init__(self) -> None:
        if self.kind not in (STATE, GENERATORS) or self.slot not in SLOTS:  # parts of a file name
            raise ValueError("it is of no known kind")
        if min(self.owner, self.step, self.num_processes, self.size) < 0:
            raise ValueError("it has a negative number")

    @property
    def key(self) -> tuple[str, int]:
        """What the file holds."""
        return self.kind, self.owner

    @property
    def facts(self) -> FileFacts:
        """The size and the checksum."""
        return FileFacts(size=self.size, checksum=self.checksum)

    @property
    def file(self) -> str:
        """The name of the file."""
        return _file(self.kind, self.owner, self.slot)

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CopyRecord:
        """Parse a record."""
        what = "the record of a copy"
        return build(cls, parse_json(text, what), what)


class CopyFolder:
    """The folder of one machine's copies. All ranks of the machine use it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Create the folder; refuse one of another user, who could replace its files."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and self.path.stat().st_uid != os.getuid():
            raise PermissionError(f"The folder for copies in memory, {self.path}, belongs to another user.")

    def free_bytes(self) -> int:
        """Return the room that is left, in the folder's file system and in memory."""
        import psutil

        return min(shutil.disk_usage(self.path).free, int(psutil.virtual_memory().available))

    def is_full(self) -> bool:
        """Tell whether no room is left, which errors of torch do not say."""
        return shutil.disk_usage(self.path).free < _NEARLY_FULL

    def used_bytes(self) -> int:
        """Return the size of all files."""
        return sum(path.stat().st_size for path in self.path.glob("*.pt"))

    def records(self) -> list[CopyRecord]:
        """Return the records of all complete files."""
        return list(self._records())

    def _records(self) -> Iterator[CopyRecord]:
        for path in sorted(self.path.glob("*.json")):
            with suppress(OSError, ValueError):  # another rank may be deleting it
                record = CopyRecord.from_json(read_bytes(path, "the record of a copy").decode())
                if (self.path / record.file).stat().st_size == record.size:
                    yield record

    def file_of(self, record: CopyRecord) -> Path:
        """Return the path of a file."""
        return self.path / record.file

    def put(
        self, kind: str, owner: int, step: int, num_processes: int, write: Callable[[Path], FileFacts]
    ) -> CopyRecord:
        """Write a file into the older slot; see [Note: two slots]."""
        mine = {record.slot: record.step for record in self._records() if record.key == (kind, owner)}
        slot = min(SLOTS, key=lambda name: mine.get(name, -1))
        file = self.path / _file(kind, owner, slot)
        record_file = file.with_suffix(".json")
        record_file.unlink(missing_ok=True)
        facts = write(file)
        record = CopyRecord(
            kind=kind,
            owner=owner,
            step=step,
            num_processes=num_processes,
            size=facts.size,
            checksum=facts.checksum,
            slot=slot,
        )
        draft = record_file.with_suffix(".partial")
        draft.write_text(record.to_json(), encoding="utf-8")
        draft.replace(record_file)
        return record

    def keep_only(self, step: int | None) -> None:
        """Delete all copies but those of one step, or all: those of a later step are not complete."""
        for record in self._records():
            if record.step != step:
                self.delete(record)

    def delete(self, record: CopyRecord) -> None:
        """Delete a file, its record first."""
        self.file_of(record).with_suffix(".json").unlink(missing_ok=True)
        self.file_of(record).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all files, and the folder if nothing else is in it."""
        for pattern in ("*.json", "*.partial", "*.pt"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()


def _file(kind: str, owner: int, slot: str) -> str:
    return f"{kind}-{owner}-{slot}.pt"
