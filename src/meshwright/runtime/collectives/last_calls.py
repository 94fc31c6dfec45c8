"""Record the newest collectives of this process in a file that outlives it.

A backend may end the process from C++ when ranks bring different shapes. The launcher then reads the records of all
ranks and compares them. A record is a write to memory: it does not communicate or block.
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
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # in whose folder a launched process keeps its records
_KEPT = 64
"""A rank that received too little proceeds, and may have made the next calls when another one ends."""
_LENGTH = 160


class LastCalls:
    """The records of one process."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with open(Path(folder) / FILE_NAME, "w+b") as file:
            file.truncate(_KEPT * _LENGTH)
            self._memory = mmap.mmap(file.fileno(), _KEPT * _LENGTH)
        self._count = 0

    def record(self, call: str, tensor: torch.Tensor) -> None:
        """Record a call before it is made."""
        text = f"{self._count} {call}({str(tensor.dtype)[6:]}{list(tensor.shape)})"
        start = self._count % _KEPT * _LENGTH
        self._memory[start : start + _LENGTH] = text.encode()[:_LENGTH].ljust(_LENGTH)
        self._count += 1


def read_calls(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Return the newest calls of a process by their number: {7: "gather(float32[4, 3])"}; empty without a record."""
    try:
        content = (Path(folder) / FILE_NAME).read_bytes()
    except OSError:
        return {}
    texts = (
        content[start : start + _LENGTH].decode(errors="replace").strip(" \0")
        for start in range(0, len(content), _LENGTH)
    )
    return {int(number): call for number, _, call in (text.partition(" ") for text in texts if text)}


_calls: LastCalls | None = None
_is_initialized = False


def record_call(call: str, tensor: torch.Tensor) -> None:
    """Record a call of this process, if a launcher may read it."""
    global _calls, _is_initialized
    if not _is_initialized:
        _is_initialized = True
        _calls = _open()
    if _calls is not None:
        _calls.record(call, tensor)


def _open() -> LastCalls | None:
    error_file = read(_ERROR_FILE)
    try:
        return LastCalls(os.path.dirname(error_file)) if error_file else None
    except OSError:  # a full disk, or a deleted folder: a record is not worth a failure
        return None
