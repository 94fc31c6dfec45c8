"""Files mapped into memory: tensors that are read when they are used, and given back without being copied.

[Note: mapped memory]
A mapped tensor is a window onto the file. Its pages belong to the kernel's page cache: reading them again costs no disk
access as long as the machine has memory to spare, and the kernel takes them back when it has not. Three calls steer it:

- `bring` asks for the pages of a tensor, from a thread that has nothing else to do, so that computing meets no page
  that is missing. Where the kernel cannot be asked (before Linux 5.14, other systems), touching each page does it.
- `let_go` says that a tensor will not be used for a while, so that it does not count as this process's memory.
- `read_into` reads without mapping, straight to where the numbers are wanted.

The mapping is private: writing to a tensor changes a copy of its page, never the file, until `let_go` forgets it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.formats.codec import THREADS

_DONT_NEED = 4
_POPULATE_READ = 22
_HUGE_PAGES = 14
_PAGE = mmap.PAGESIZE
_PIECE = 1 << 23


class MappedFile:
    """A file whose tensors are views of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.size = self.path.stat().st_size
        self._bytes: Tensor | None = None

    @property
    def bytes(self) -> Tensor:
        """The whole file; mapped when it is first asked for."""
        if self._bytes is None:
            if self.size == 0:
                self._bytes = torch.empty(0, dtype=torch.uint8)
            else:
                storage: Any = torch.UntypedStorage.from_file(str(self.path), False, self.size)
                self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        return self._bytes

    def tensor(self, dtype: torch.dtype, shape: Iterable[int], start: int = 0) -> Tensor:
        """Return a part of the file as a tensor, without reading it."""
        dims = list(shape)
        end = start + math.prod(dims) * dtype.itemsize
        if end > self.size:
            raise ValueError(f"{self.path} is too short: {end} bytes are needed and it has {self.size}.")
        raw = self.bytes[start:end]
        if start % dtype.itemsize:  # torch wants numbers at multiples of their size
            return raw.clone().view(dtype).view(dims)
        window = raw.view(dtype).view(dims)
        window._is_window = True  # type: ignore[attr-defined]
        return window


def read_into(path: Path, start: int, target: Tensor) -> None:
    """Fill a contiguous tensor on the CPU from a file."""
    raw: Any = target.detach().reshape(-1).view(torch.uint8).numpy() if target.numel() else b""
    view = memoryview(raw)
    pieces = range(0, len(view), _PIECE)
    with path.open("rb", buffering=0) as file:

        def read(first: int) -> None:
            _read_piece(file.fileno(), path, start + first, view[first : first + _PIECE])

        if len(pieces) < 2:
            for first in pieces:
                read(first)
        else:  # new memory is slow to fill, because the kernel clears each page before: let there be few
            first_page, last_page = _pages(target, inward=True)
            _advise(first_page, last_page - first_page, _HUGE_PAGES)
            with ThreadPoolExecutor(min(THREADS, len(pieces)), thread_name_prefix="load") as pool:
                list(pool.map(read, pieces))


def _read_piece(descriptor: int, path: Path, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise ValueError(f"{path} is too short: it ends after {start + done} bytes.")
        done += count


def is_mapped(tensor: Tensor) -> bool:
    """Tell whether a tensor is a window onto a file."""
    return hasattr(tensor, "_is_window")  # a copy of it, and a view, have no such mark


def bring(tensor: Tensor) -> None:
    """Have the pages of a mapped tensor in memory; others are there."""
    if not is_mapped(tensor):
        return
    first, last = _pages(tensor, inward=False)
    if last > first and _advise(first, last - first, _POPULATE_READ) != 0:
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        raw[::_PAGE].sum()


def let_go(tensor: Tensor) -> None:
    """Stop counting the pages of a mapped tensor as this process's memory; the neighbours' pages stay.

    Other memory would be lost by the same call, so it is left alone.
    """
    if not is_mapped(tensor):
        return
    first, last = _pages(tensor, inward=True)
    if last > first:
        _advise(first, last - first, _DONT_NEED)


def _pages(tensor: Tensor, inward: bool) -> tuple[int, int]:
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    if inward:
        return -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    return start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE


def _advise(address: int, length: int, advice: int) -> int:
    libc = _libc()
    return -1 if libc is None else int(libc.madvise(address, length, advice))


@cache
def _libc() -> Any:
    """Return the C library, whose calls leave Python's lock to others, as those of the mmap module do not."""
    try:
        library = ctypes.CDLL(None)
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return library
