"""One object per file: safetensors for tensors, torch's format for the rest. Reading executes no code."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidDataError, UnsafeFileError
from ...precision.quantized import is_composed, parts_of, with_parts
from ...runtime.collectives.nested import leaves, recursively_apply
from ...runtime.streams.mapping import MappedFile, copy_storages
from ...untrusted import open_regular
from ..layout import FileFacts
from .objects import read_objects, read_old_objects

_ARCHIVE = b"PK\3\4"
_BLOCK = 1 << 25
_PIECE = 1 << 20


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
    content = _mapped(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True} | load_options
    is_archive = _is_archive(content)
    if not options["weights_only"]:
        return torch.load(path, **(options if is_archive else options | {"mmap": None}))
    read = _read_data(content, str(path))
    if is_archive and not options.get("mmap"):
        try:
            read = _with_own_memory(read)
        except Exception as error:  # of a class that was allowed, in a state that is none
            raise InvalidDataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return _placed(read, options["map_location"])


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what `torch.save` wrote; a file that holds code is refused unless `weights_only=False` is given.

    It is read as `load_state` reads it, and then by torch, whose options it takes.
    """
    options = {"weights_only": True, **kwargs}
    if options["weights_only"] in (True, None):  # None is torch's default, which is True
        _require_data(f)
    return torch.load(f, map_location=map_location, **options)


def _require_data(file: Any) -> None:
    """Refuse a file, or the rest of a stream, that is not data only."""
    if isinstance(file, (str, os.PathLike)):
        content, what = _mapped(Path(file)), os.fspath(file)
    else:
        content, what = _rest_of(file), str(getattr(file, "name", "the stream"))
    _read_data(content, what)


_REMEDY = (
    "If you trust where it comes from, allow the class with torch.serialization.add_safe_globals, or pass "
    'load_kwargs={"weights_only": False}'
)


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a regular file."""
    with open_regular(path, path.name):
        return MappedFile(path).bytes


def _rest_of(stream: Any) -> Tensor:
    """Return the bytes of a stream from where it is; those of a file are mapped."""
    start = stream.tell()
    try:
        whole: Any = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (AttributeError, OSError, ValueError):
        rest = bytearray(stream.read())
        stream.seek(start)
        return torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(whole, dtype=torch.uint8)[start:]


def _is_archive(content: Tensor) -> bool:
    return bytes(content[: len(_ARCHIVE)].tolist()) == _ARCHIVE


def _read_data(content: Tensor, what: str) -> Any:
    """Return what the bytes of a file of `torch.save` hold; of an archive, its tensors are views of them."""
    try:
        return (read_objects if _is_archive(content) else read_old_objects)(content, what)
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{error}. {_REMEDY}", error.culprit) from None


def read_state(path: Path, **load_options: Any) -> dict[str, Any]:
    """Read a dict by names, such as the weights of a model."""
    state = read(path, **load_options)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InvalidDataError(f"{path} holds {type(state).__name__}, expected weights by their names")
    return dict(state)


def require_sound_safetensors(path: Path) -> None:
    """Let the library check the header of a safetensors file: types, shapes, and places without gaps and overlaps."""
    from safetensors import SafetensorError, safe_open

    with open_regular(path, path.name):
        pass
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise InvalidDataError(f"{path} is damaged or incomplete: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, KeyError, TypeError) as error:  # KeyError: a dtype that its torch does not have
        raise InvalidDataError(f"{path} is damaged: {error}") from error


def _placed(value: Any, location: Any) -> Any:
    """Move tensors to a device; a function or a dict of `torch.load` is about devices of others, and says nothing."""
    if not isinstance(location, (str, torch.device)) or torch.device(location).type == "cpu":
        return value
    return recursively_apply(lambda tensor: tensor.to(location), value)


def _with_own_memory(mapped: Any) -> Any:
    """Return a copy of what was read; composed tensors, such as 8-bit moments of torchao, are copied in parts."""
    found = leaves(mapped)
    composed = [leaf for leaf in found if isinstance(leaf, Tensor) and is_composed(leaf)]
    parts = [part for tensor in composed for part in parts_of(tensor)]
    # deepcopy would copy numbers as often as there are parameters that share them.
    params = [leaf for leaf in found if type(leaf) is nn.Parameter]
    values = [param.detach() for param in params]
    copies = copy_storages(filter(_is_plain_tensor, [*found, *parts, *values]))
    for param, value in zip(params, values, strict=True):
        if id(value) in copies:
            copies[id(param)] = nn.Parameter(copies[id(value)], param.requires_grad)
    # deepcopy cannot copy all of them.
    copies |= {id(leaf): leaf.clone() for leaf in found if isinstance(leaf, Tensor) and leaf.layout != torch.strided}
    copies |= {id(leaf): with_parts(leaf, lambda part: copies[id(part)]) for leaf in composed}
    return deepcopy(mapped, copies)


def _is_plain_tensor(leaf: Any) -> bool:
    is_stored = type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_meta
    return is_stored and not (leaf.is_quantized or leaf.requires_grad or leaf.is_conj() or leaf.is_neg())


def culprit_in(path: Path) -> str | None:
    """Return the name of what `read` will refuse in a file, or None. Tensors are not read."""
    try:
        _read_data(_mapped(path), str(path))
    except UnsafeFileError as error:
        return error.culprit
    return None


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
