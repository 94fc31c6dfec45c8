"""Memory-mapped files: tensors that are read on use, and released without a copy.

[Note: mapped memory]
A mapped tensor is a view of the file. Its pages belong to the page cache of the kernel: reading them again needs no
disk access while memory is free, and the kernel evicts them when it is not. Three functions control this:

- `prefetch_pages` loads the pages of a tensor in a background thread, so that computation causes no page faults. Where
  the kernel has no such call (before Linux 5.14, other systems), it touches each page.
- `release_pages` drops the pages of a tensor from this process, so that they do not count as its memory.
- `read_into` reads without mapping, directly into the target.
- `copy_storages` copies mapped tensors to memory of their own.

`new_shared_file` maps a file without a name, for tensors that are written, too: the kernel writes its pages to disk
when memory is scarce, and frees the disk when the tensors are gone.

The mapping of a `MappedFile` is private: writing to a tensor changes a copy of its page, never the file, until
`release_pages` drops it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidDataError

THREADS = min(8, os.cpu_count() or 1)
"""Enough to saturate the memory bandwidth."""
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22
_MADV_HUGEPAGE = 14
_MS_SYNC = 4
_PAGE = mmap.PAGESIZE
_PIECE = 1 << 23
_MOST_NUMBER = 1 << 62
_MOST_DIMENSIONS = 64


class MappedFile:
    """A file whose tensors are views of the mapping."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.size = self.path.stat().st_size
        self._bytes: Tensor | None = None

    @property
    def bytes(self) -> Tensor:
        """The whole file; mapped on first use."""
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
        is_shape = all(type(number) is int and 0 <= number < _MOST_NUMBER for number in (start, *dims))
        if not is_shape or len(dims) > _MOST_DIMENSIONS:
            raise InvalidDataError(f"{self.path} has no tensor of shape {str(dims)[:200]} at {str(start)[:40]}.")
        end = start + math.prod(dims) * dtype.itemsize
        if end > self.size:
            raise InvalidDataError(f"{self.path} is too short: {end} bytes are needed and it has {self.size}.")
        raw = self.bytes[start:end]
        try:
            if start % dtype.itemsize:  # torch requires aligned elements
                return raw.clone().view(dtype).view(dims)
            view = raw.view(dtype).view(dims)
        except RuntimeError as error:  # a shape that is too large although it is empty
            raise InvalidDataError(f"{self.path} has no tensor of {dtype} of shape {dims}: {error}") from None
        view._is_mapped_view = True  # type: ignore[attr-defined]
        return view


def new_shared_file(folder: Path, num_bytes: int) -> Tensor:
    """Return bytes that are kept in a new file of a folder; the file has no name, so that nothing is left of it."""
    descriptor, path = tempfile.mkstemp(prefix="accelerate_", suffix=".dat", dir=folder)
    try:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        os.posix_fallocate(descriptor, 0, num_bytes)  # a full disk is an error here, and not a signal later
        storage: Any = torch.UntypedStorage.from_file(path, True, num_bytes)
    finally:
        os.close(descriptor)
        os.unlink(path)
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    buffer._is_mapped_view = True  # type: ignore[attr-defined]
    return buffer


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
        else:
            _use_huge_pages(target)
            with ThreadPoolExecutor(min(THREADS, len(pieces)), thread_name_prefix="load") as pool:
                list(pool.map(read, pieces))


def _use_huge_pages(target: Tensor) -> None:
    """Let an empty tensor have huge pages: the kernel clears each new page before it is filled, and these are few."""
    first, last = _pages(target, inward=True)
    _advise(first, last - first, _MADV_HUGEPAGE)


def copy_storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return a copy of every tensor, by the id of the tensor; what shares memory shares it in the copies."""
    copies: dict[int, Tensor] = {}
    storages: dict[tuple[int, int], Tensor] = {}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="load") as pool:
        for tensor in tensors:
            source = tensor.untyped_storage()
            place = source.data_ptr(), source.nbytes()
            if place not in storages:
                storages[place] = _copy_bytes(torch.empty(0, dtype=torch.uint8).set_(source), pool)
            own: Any = storages[place].untyped_storage()
            copies[id(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(
                own, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
    return copies


def _copy_bytes(source: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    target = torch.empty_like(source)
    pieces = range(0, len(source), _PIECE)
    if len(pieces) < 2:  # a thread would take longer to begin
        return target.copy_(source)
    _use_huge_pages(target)

    def copy(first: int) -> None:
        target[first : first + _PIECE].copy_(source[first : first + _PIECE])

    list(pool.map(copy, pieces))
    return target


def _read_piece(descriptor: int, path: Path, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise InvalidDataError(f"{path} is too short: it ends after {start + done} bytes.")
        done += count


def is_mapped(tensor: Tensor) -> bool:
    """Tell whether a tensor is a view of a file."""
    return hasattr(tensor, "_is_mapped_view")  # copies and views of it do not have the attribute


def prefetch_pages(tensor: Tensor) -> None:
    """Load the pages of a mapped tensor into memory; do nothing for others."""
    if not is_mapped(tensor):
        return
    first, last = _pages(tensor, inward=False)
    if last > first and _advise(first, last - first, _MADV_POPULATE_READ) != 0:
        raw = tensor.detach().reshape(-1).view(torch.uint8)
        raw[::_PAGE].sum()


def release_pages(tensor: Tensor) -> None:
    """Drop the pages of a mapped tensor from this process; pages shared with neighbouring tensors stay.

    Do nothing for other tensors, whose values the call would destroy.
    """
    if not is_mapped(tensor):
        return
    first, last = _pages(tensor, inward=True)
    if last > first:
        _advise(first, last - first, _MADV_DONTNEED)


def write_pages(tensor: Tensor) -> None:
    """Write the changed pages of a shared file to disk; do nothing for others.

    Memory that is limited by a control group holds no more than that of changed pages: the kernel frees only those that
    are written.
    """
    if is_mapped(tensor) and tensor.numel() and (libc := _libc()) is not None:
        first, last = _pages(tensor, inward=False)
        libc.msync(first, last - first, _MS_SYNC)


def return_freed_memory() -> None:
    """Let the C library return freed memory to the kernel: between small objects it keeps pages that nobody uses."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


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
    """Return the C library, whose calls release the GIL, unlike those of the mmap module."""
    try:
        library = ctypes.CDLL(None)
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return library
