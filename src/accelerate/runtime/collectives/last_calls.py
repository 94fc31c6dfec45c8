"""The newest collectives of this process, in a file that outlives it.

A backend may end the process from C++ when ranks bring different shapes. The launcher then reads these notes and
compares them. A note is a write to memory: no rank waits for another one, and nothing is sent.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.environment import read

if TYPE_CHECKING:
    import torch

FILE_NAME = "collectives"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # beside which a launched process leaves its notes
_KEPT = 4
"""A rank that received too little goes on, and may have made the next calls when another one ends."""
_LENGTH = 160


class LastCalls:
    """The notes of one process."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with open(Path(folder) / FILE_NAME, "w+b") as file:
            file.truncate(_KEPT * _LENGTH)
            self._memory = mmap.mmap(file.fileno(), _KEPT * _LENGTH)
        self._count = 0

    def note(self, call: str, tensor: torch.Tensor) -> None:
        """Write down a call before it is made."""
        text = f"{self._count} {call}({str(tensor.dtype)[6:]}{list(tensor.shape)})"
        start = self._count % _KEPT * _LENGTH
        self._memory[start : start + _LENGTH] = text.encode()[:_LENGTH].ljust(_LENGTH)
        self._count += 1


def read_calls(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Return the newest calls of a process that left notes, by their number: {7: "gather(float32[4, 3])"}."""
    try:
        notes = (Path(folder) / FILE_NAME).read_bytes()
    except OSError:
        return {}
    words = (
        notes[start : start + _LENGTH].decode(errors="replace").strip(" \0") for start in range(0, len(notes), _LENGTH)
    )
    return {int(number): call for number, _, call in (text.partition(" ") for text in words if text)}


_calls: LastCalls | None = None
_is_looked_for = False


def note(call: str, tensor: torch.Tensor) -> None:
    """Write down a call of this process, if somebody may read it."""
    global _calls, _is_looked_for
    if not _is_looked_for:
        _is_looked_for = True
        _calls = _of_this_process()
    if _calls is not None:
        _calls.note(call, tensor)


def _of_this_process() -> LastCalls | None:
    error_file = read(_ERROR_FILE)
    try:
        return LastCalls(os.path.dirname(error_file)) if error_file else None
    except OSError:  # a full disk, or a folder that is gone: a note is not worth a failure
        return None
