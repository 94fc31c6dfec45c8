"""One object per file: safetensors for tensors, torch's format for the rest. Reading executes no code."""

from __future__ import annotations

import datetime
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ...precision.quantized import is_composed, parts_of, with_parts
from ...runtime.collectives.nested import leaves
from ...runtime.streams.mapping import copy_storages
from ..layout import FileFacts

_BLOCK = 1 << 25
_PIECE = 1 << 20


class UnsafeFileError(ValueError):
    """Refuse a file whose loading would execute code.

    The file holds pickled objects beyond tensors and plain data. Load it only if you trust who wrote it: the message
    says how.
    """


def write(state: Any, path: Path) -> None:
    """Write an object to a file, in the format of its suffix."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(dict(state), path, metadata={"format": "pt"})
    else:
        with _without_crc32():
            torch.save(state, path)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Disable the checksums of torch, which are never read: the checkpoint has its own."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read(path: Path, **load_options: Any) -> Any:
    """Read an object; files in torch's format may hold data only, unless `weights_only=False` is given.

    The tensors have memory of their own, unless `mmap=True` is given: the file may be deleted, also on a network disk.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True} | load_options
    try:
        with torch.serialization.safe_globals(_plain_data()):
            if "mmap" in options or not options["weights_only"] or not zipfile.is_zipfile(path):
                return torch.load(path, **options)
            mapped = torch.load(path, mmap=True, **options)
        return _with_own_memory(mapped)
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(
            f"{path} is not loaded, because it holds more than data{_culprit(error)}. If you trust where it comes "
            "from, allow the class with torch.serialization.add_safe_globals, or pass "
            'load_kwargs={"weights_only": False}'
        ) from error


def _with_own_memory(mapped: Any) -> Any:
    """Return a copy of what was read; composed tensors, such as 8-bit moments of torchao, are copied in parts."""
    found = leaves(mapped)
    composed = [leaf for leaf in found if isinstance(leaf, Tensor) and is_composed(leaf)]
    parts = [part for tensor in composed for part in parts_of(tensor)]
    copies = copy_storages(leaf for leaf in [*found, *parts] if _is_plain_tensor(leaf))
    copies |= {id(leaf): with_parts(leaf, lambda part: copies[id(part)]) for leaf in composed}
    return deepcopy(mapped, copies)


def _is_plain_tensor(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout == torch.strided and not (leaf.is_quantized or leaf.requires_grad)


def unsafe_globals_in(path: Path) -> list[str]:
    """Return the names of the classes in a file that `read` will refuse. Tensors are not read."""
    with torch.serialization.safe_globals(_plain_data()):
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)


def facts_of(path: Path, pool: ThreadPoolExecutor) -> FileFacts:
    """Return the size and the checksum of a file: the CRC-32 of the CRC-32s of its blocks, by several threads.

    It detects damage at memory bandwidth. It does not protect against forged files.
    """
    size = path.stat().st_size
    blocks = pool.map(lambda start: _crc_of_block(path, start), range(0, max(size, 1), _BLOCK))
    total = zlib.crc32(b"".join(crc.to_bytes(4, "big") for crc in blocks))
    return FileFacts(size=size, checksum=f"crc32/{_BLOCK}:{total:08x}")


def _crc_of_block(path: Path, start: int) -> int:
    crc = 0
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        buffer = memoryview(bytearray(_PIECE))
        left = _BLOCK
        while left and (count := stream.readinto(buffer[: min(left, _PIECE)])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc


@cache
def _plain_data() -> list[Any]:
    """Return types of plain data that torch does not allow by itself: scalars and arrays of NumPy, dates, paths.

    NumPy 2 renamed the module of two functions; files of either version are read by either.
    """
    import numpy as np

    scalars = [np.dtype(code) for code in np.typecodes["All"] if code != "O"]  # O: any object
    functions = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64().__reduce__()[0]}
    renamed = [
        (function, f"{module}.multiarray.{name}")
        for name, function in functions.items()
        for module in ("numpy.core", "numpy._core")
    ]
    return [
        *renamed,
        np.ndarray,
        np.dtype,
        *{type(kind) for kind in scalars},
        *(bool, int, float, str, list, tuple, dict, set, frozenset, range, slice),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(Decimal, Fraction, PurePosixPath, PosixPath),
    ]


def _culprit(error: Exception) -> str:
    """Return the name that torch refused, from its long message."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f" ({found[1]})" if found else ""
