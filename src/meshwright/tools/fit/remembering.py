"""The file in which batch sizes that fit are remembered for the next start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config.launch.files import config_folder
from ...errors import InvalidDataError
from ...untrusted import build, read_json

FILE_NAME = "batch_sizes.json"


def default_path() -> Path:
    """Return the file that is used where none is named: beside the file of `meshwright config`."""
    return config_folder() / FILE_NAME


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one function under certain facts."""

    facts: Mapping[str, Any]
    """What decides about memory besides the models: devices, processes, number format, versions."""
    models: list[str] = field(default_factory=list)
    """What the function prepared."""
    batch_size: int | None = None
    """The size that fits; None if only too large ones are known."""
    too_large: list[int] = field(default_factory=list)

    def without(self, batch_size: int) -> Entry:
        """Return the entry after this size turned out to be too large."""
        fits = self.batch_size if self.batch_size is not None and self.batch_size < batch_size else None
        return replace(self, batch_size=fits, too_large=sorted({*self.too_large, batch_size}))


class Remembered:
    """The entries of a file. A file that cannot be read or written is as one that is empty."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def find(self, facts: Mapping[str, Any]) -> Entry | None:
        """Return the entry of these facts."""
        return next((entry for entry in self._read() if entry.facts == dict(facts)), None)

    def differences(self, facts: Mapping[str, Any]) -> str:
        """Return how these facts differ from the last entry of the same function; empty if there is none."""
        same = [entry for entry in self._read() if entry.facts.get("function") == facts["function"]]
        if not same:
            return ""
        before = same[-1].facts
        return ", ".join(
            f"{name} was {before.get(name)} and is {value}"
            for name, value in facts.items()
            if before.get(name) != value
        )

    def store(self, entry: Entry) -> bool:
        """Write an entry in place of that of the same facts; return whether it could be written."""
        if self.path is None:
            return False
        entries = [*(each for each in self._read() if each.facts != dict(entry.facts)), entry]
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps([asdict(each) for each in entries], indent=1), encoding="utf-8")
            os.replace(draft, self.path)
        except OSError:  # a read-only home: the search is made again at the next start
            with suppress(OSError):
                draft.unlink()
            return False
        return True

    def _read(self) -> list[Entry]:
        if self.path is None:
            return []
        try:
            return build(list[Entry], read_json(self.path, "what was found before"), "what was found before")
        except (OSError, InvalidDataError):  # none yet, or of another version
            return []
