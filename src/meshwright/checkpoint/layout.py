"""Names of files and folders, and the record that makes a folder a checkpoint.

[Note: commit] A checkpoint is written into `<name>.partial-<id>/<name>/`, the draft, and flushed; then `commit.json` is
written into it, which lists every file with its size and hash; then the draft is moved out, by a rename. Only then is
anything deleted, and what is deleted is first renamed to `<name>.removed-<id>`. So a folder named `<name>` is complete
at any moment. Hooks get the draft, whose own name is the checkpoint's: scripts read the step from it.
When a folder is replaced, the old one is moved to `<name>.replaced-<id>` before the new one takes its name: if the
process dies between the two, the new one has its record already, and the next save or load renames it. Other files in
the old folder are moved to the new one; only saves delete leftovers. Who commits, and what other ranks add afterwards:
[Note: who commits] in supplements.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..errors import InvalidDataError
from ..untrusted import build, parse_object, printable, read_bytes, require_plain_name

FORMAT = 1
COMMIT_FILE = "commit.json"
PROGRESS_FILE = "progress.bin"
SCALER_FILE = "scaler.pt"
CHECKPOINTS_FOLDER = "checkpoints"
SHARDS = "shards"
"""The form of a checkpoint whose models and optimizers are folders with the shards of all ranks."""

_UNFINISHED = re.compile(r"^(?P<name>.+)\.(?P<state>partial|removed|replaced)-(?P<id>[0-9a-f]{8})$")
_PUBLISHED = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin"
    r"|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|commit_\d+\.json"
)
_AUTOMATIC = re.compile(r"checkpoint_(?P<iteration>[0-9]{1,18})")


def numbered(stem: str, index: int, suffix: str) -> str:
    """Return the published name of the index-th file of a kind: `model.safetensors`, `model_1.safetensors`."""
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


def model_folder(index: int) -> str:
    """Return the published folder with the shards of the index-th model."""
    return f"pytorch_model_fsdp_{index}"


def engine_folder(index: int) -> str:
    """Return the published folder of the index-th model whose engine writes its own files."""
    return numbered("pytorch_model", index, "")


def optimizer_folder(index: int) -> str:
    """Return the published folder with the shards of the index-th optimizer."""
    return f"optimizer_{index}"


def random_states_file(rank: int) -> str:
    """Return the file of one rank's generators."""
    return f"random_states_{rank}.pkl"


def supplement_file(rank: int) -> str:
    """Return the record of what one rank added to a checkpoint that another rank has committed."""
    return f"commit_{rank}.json"


def custom_file(index: int) -> str:
    """Return the file of a registered object."""
    return f"custom_checkpoint_{index}.pkl"


def automatic_name(iteration: int) -> str:
    """Return the name of an automatic checkpoint."""
    return f"checkpoint_{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the number of an automatic checkpoint, or None for another name."""
    found = _AUTOMATIC.fullmatch(name)
    return int(found["iteration"]) if found else None


def unfinished(name: str) -> tuple[str, str] | None:
    """Return the name and the state ("partial", "removed" or "replaced") of a folder that is not committed, or None."""
    found = _UNFINISHED.match(name)
    return (found["name"], found["state"]) if found else None


def unfinished_name(name: str, state: str, token: str) -> str:
    """Return the name of a folder in a state, from which `unfinished` reads both."""
    return f"{name}.{state}-{token}"


def is_published(name: str) -> bool:
    """Tell whether this is the name of a file of a checkpoint, of this version or of accelerate 1.x."""
    return name in (COMMIT_FILE, PROGRESS_FILE) or _PUBLISHED.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """The expected size and checksum of a file."""

    size: int
    checksum: str

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"a file has {self.size} bytes")


class NewerFormatError(InvalidDataError):
    """Report a record of a newer version of this library, which is not damaged.

    Update the library, or load the checkpoint with the version that wrote it.
    """


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """The record of a committed checkpoint."""

    num_processes: int
    parts: Mapping[str, str]
    """Part -> its file; the file of a part of every rank contains `{rank}`."""
    files: Mapping[str, FileFacts]
    folder: str = ""
    """The folder of the files relative to the record: empty on a disk, `data-<token>` behind a URL."""
    token: str = ""
    """The id of the save. Files that a rank adds later carry the same one."""
    save: str = ""
    """The position of the run, for ranks that add to it. See [Note: who commits] in supplements.py."""
    step: int = 0
    iteration: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    format: int = FORMAT

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, what: str = COMMIT_FILE) -> CommitRecord:
        """Parse a record; raise InvalidDataError if it is damaged or from a newer version."""
        read = parse_object(text, what)
        _require_known(read)
        record = build(cls, read, what)
        for name in (*record.files, *record.parts.values(), *filter(None, [record.folder])):
            require_plain_name(name, what)
        if record.num_processes < 1:
            raise InvalidDataError(f"{what} is damaged: it is of {record.num_processes} processes")
        return record

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> CommitRecord:
        """Read the record from its file."""
        name = os.path.basename(file)
        return cls.from_json(read_bytes(file, name), name)


def _require_known(read: Mapping[str, Any]) -> None:
    """Refuse a record of a newer format, or with fields that this version does not know."""
    written = read.get("format")
    if type(written) is int and written > FORMAT:
        difference = f"format {written}, this one reads {FORMAT}"
    elif unknown := read.keys() - {each.name for each in fields(CommitRecord)}:
        difference = f"{COMMIT_FILE} has {printable(', '.join(sorted(unknown)))}"
    else:
        return
    raise NewerFormatError(f"it was written by a newer version ({difference}): update meshwright")
