"""What names mean in torch's files: tensors of the file's own bytes, and plain data, each made by a checked call.

torch's own reader with `weights_only=True` has two gaps that matter here. It allows what a class of NumPy or of the
standard library does with a state, which can make pointers of bytes; and it allows calls that allocate, which give
uninitialised memory as numbers. So names have constructors of their own: an array gets exactly as many bytes as it has
elements, a tensor is a view of bytes that are in the file.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import PosixPath, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InvalidDataError, UnsafeFileError
from ...untrusted import printable
from .pickles import Constructor, PendingObject, interpret, interpret_at, require, require_finished, require_keys

_PROGRAM = "data.pkl"
_OLD_HEAD = [0x1950A86A20F9469CFC6C, 1001]
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s6xH8xLL3H8xL")
_ENTRY_MAGIC = b"PK\1\2"
_END = struct.Struct("<4s6xHLLH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_LARGE_END = struct.Struct("<4s28xQQQ")
_MAX_32 = 0xFFFFFFFF
_DTYPE_CODE = re.compile(r"[?bBhHiIlLqQefdgFDG]|[biufc]\d{1,2}|[SUV]\d{1,6}|[mM]8")
_UNITS = {b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as", b"generic"}
_NEVER = ("os", "posix", "nt", "sys", "torch.nested")
"""Modules of which nothing is called, even if it was allowed; torch does not check the offsets of nested tensors."""
_NEVER_CALLED = ("torch.distributed.device_mesh.DeviceMesh",)
"""What opens process groups when it is called. An object of it can be read."""
_MOST_REPEATED_BYTES = 1 << 26
_VALUE, _TENSOR = 512, 1024  # bytes that one takes beside its numbers
_OWN_ATTRIBUTES = ("_is_mapped_view", "trigger_wait", "device_mesh")
"""What this package looks for on tensors. Of names with two underscores NumPy takes addresses of memory."""


def read_objects(content: Tensor, what: str) -> Any:
    """Return what the bytes of a file of `torch.save` hold; its tensors are views of them."""
    return Records(content, what).read()


def read_old_objects(file: Tensor, what: str) -> Any:
    """Return what a file of `torch.save` before torch 1.6 holds: pickles one after the other, then the numbers."""
    content = bytes(file.numpy())
    storages: dict[str, _Storage] = {}
    left = len(content)

    def storage(key: Any) -> _Storage:
        nonlocal left
        kind, name, count = _reference(key)
        if name not in storages:
            left -= count * kind.dtype.itemsize
            require(count >= 0 <= left, "it declares more numbers than it has")
            own = torch.empty(count * kind.dtype.itemsize, dtype=torch.uint8)
            storages[name] = _Storage(own.untyped_storage(), kind.dtype)
        require(storages[name].bytes.nbytes() == count * kind.dtype.itemsize, "a storage has two sizes")
        return _Storage(storages[name].bytes, kind.dtype)

    names, end = TorchNames(storage), 0
    head = []
    for _ in range(3):  # a number, a version, facts about the machine
        value, end = interpret_at(content, end, names, what)
        head.append(value)
    require(head[:2] == _OLD_HEAD, f"{what} is damaged: it is no file of torch.save")
    result, end = interpret_at(content, end, names, what)
    keys, end = interpret_at(content, end, names, what)
    require(
        type(keys) is list and sorted(map(str, keys)) == sorted(storages), f"{what} is damaged: numbers are missing"
    )
    for name in keys:
        target = storages[name]
        size = target.bytes.nbytes()
        (count,) = struct.unpack("<q", content[end : end + 8].ljust(8))
        numbers = file[end + 8 : end + 8 + size]
        is_whole = count * target.dtype.itemsize == size == len(numbers)
        require(is_whole, f"{what} is damaged: the numbers of a storage are not whole")
        torch.empty(0, dtype=torch.uint8).set_(target.bytes).copy_(numbers)
        end += 8 + size
    return result


def _reference(key: Any) -> tuple[_StorageKind, str, int]:
    """Return the type, the name and the length of the storage that a tensor refers to."""
    require(type(key) is tuple and len(key) >= 5 and key[0] == "storage", "a reference is not one to a storage")
    kind, name, count = key[1], key[2], key[4]
    require(type(kind) is _StorageKind and type(name) is str and type(count) is int, "a storage has no type")
    require(len(key) < 6 or key[5] is None, "a storage is a part of another one")
    return kind, name, count


class Records:
    """The records of `torch.save`: an uncompressed zip archive, in a file or in a part of one."""

    def __init__(self, content: Tensor, what: str) -> None:
        self._what = what
        self._storage_bytes = content.untyped_storage()
        self._start = content.storage_offset()
        part: Any = content.numpy()
        self._content = memoryview(part)
        self._storages: dict[str, Any] = {}
        try:
            self._entries = _directory(self._content)
        except (InvalidDataError, struct.error, UnicodeDecodeError) as error:
            raise InvalidDataError(f"{what} is damaged: {error}") from error
        programs = [name for name in self._entries if name.count("/") == 1 and name.endswith(f"/{_PROGRAM}")]
        require(len(programs) == 1, f"{what} is damaged: its records are not those of one object")
        self._prefix = programs[0].removesuffix(_PROGRAM)

    def read(self) -> Any:
        """Return the object."""
        if f"{self._prefix}byteorder" in self._entries:
            is_native = self._bytes("byteorder") == sys.byteorder.encode()
            require(is_native, f"{self._what} was written on a machine with another order of bytes")
        return interpret(self._bytes(_PROGRAM), TorchNames(self._storage), self._what)

    def _bytes(self, name: str) -> bytes:
        start, end = self._place(name)
        return bytes(self._content[start:end])

    def _place(self, name: str) -> tuple[int, int]:
        """Return where the bytes of a record begin and end."""
        entry = _ArchiveRecord.at(self._content, self._entries[f"{self._prefix}{name}"])
        magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(self._content, entry.place)
        start = entry.place + _LOCAL_HEADER.size + name_length + extra_length
        # `_directory` has left room for it, but for the length of what is between.
        is_whole = magic == b"PK\3\4" and start + entry.size <= self._end_of(entry)
        require(is_whole, f"{self._what} is damaged: the record {printable(name)} is not whole")
        return start, start + entry.size

    def _end_of(self, entry: _ArchiveRecord) -> int:
        """Return where the next record begins, or the directory."""
        is_last = bytes(self._content[entry.next : entry.next + 4]) != _ENTRY_MAGIC
        return next(iter(self._entries.values())) if is_last else _ArchiveRecord.at(self._content, entry.next).place

    def _storage(self, key: Any) -> _Storage:
        """Return a view of the bytes of a record; the same one for the same key."""
        kind, name, count = _reference(key)
        if name not in self._storages:
            start, end = self._place(f"data/{name}")
            self._storages[name] = self._storage_bytes[self._start + start : self._start + end]
        storage = self._storages[name]
        require(storage.nbytes() == count * kind.dtype.itemsize, f"storage {name} has another size than its record")
        return _Storage(storage, kind.dtype)


class _ArchiveRecord(NamedTuple):
    """What the directory of an archive says of a record."""

    name: bytes
    place: int
    size: int
    next: int
    """Where the next entry begins."""

    @classmethod
    def at(cls, content: memoryview, position: int) -> _ArchiveRecord:
        """Return the entry that begins at a position."""
        magic, method, packed, size, name_length, extra_length, comment_length, place = _ENTRY.unpack_from(
            content, position
        )
        require(magic == _ENTRY_MAGIC, "its directory has an entry that is none")
        require(method == 0, "its records are compressed, and torch.save compresses nothing")
        name_end = position + _ENTRY.size + name_length
        extra_end = name_end + extra_length
        if _MAX_32 in (packed, size, place):  # a large file has them after the name
            fields = iter(_large_fields(bytes(content[name_end:extra_end])))
            size, packed, place = (next(fields, -1) if each == _MAX_32 else each for each in (size, packed, place))
        require(packed == size >= 0 and place >= 0, "a record has two sizes")
        return cls(bytes(content[position + _ENTRY.size : name_end]), place, size, extra_end + comment_length)


def _large_fields(extra: bytes) -> list[int]:
    """Return the numbers of 64 bits that the directory has for a record."""
    while extra:
        kind, length = struct.unpack_from("<HH", extra)
        require(4 + length <= len(extra), "its directory ends early")
        if kind == 1:
            return [number for (number,) in struct.iter_unpack("<Q", extra[4 : 4 + length // 8 * 8])]
        extra = extra[4 + length :]
    return []


def _directory(content: memoryview) -> dict[str, int]:
    """Return where the entry of each record is: in order, without gaps in the directory or overlaps of records.

    An archive may have a record for every tensor of a large model, so nothing but this is kept of them.
    """
    end = len(content) - _END.size
    require(end >= 0, "it ends early")
    magic, count, length, position, comment = _END.unpack_from(content, end)
    require(magic == b"PK\5\6" and comment == 0, "it does not end as an archive")
    magic, large_end = _LOCATOR.unpack_from(content, max(end - _LOCATOR.size, 0))
    if magic == b"PK\6\7":  # a file that could have become large
        end = min(large_end, end)
        magic, count, length, position = _LARGE_END.unpack_from(content, end)
        require(magic == b"PK\6\6", "it does not end as an archive")
    require(position + length == end, "its directory is not where it should be")
    found: dict[str, int] = {}
    first_free, start = 0, position
    while position < end:
        entry = _ArchiveRecord.at(content, position)
        require(first_free <= entry.place, "two records are at the same place, or not in order")
        first_free = entry.place + _LOCAL_HEADER.size + len(entry.name) + entry.size
        found[entry.name.decode("utf-8")] = position
        position = entry.next
    require(position == end and first_free <= start, "its directory is not where it should be")
    require(len(found) == count, "two of its records have one name")
    return found


class _StorageKind(NamedTuple):
    dtype: torch.dtype


class _Storage(NamedTuple):
    """Bytes in a file, as numbers of a type."""

    bytes: Any
    dtype: torch.dtype


class TorchNames:
    """The names in torch's files, and those that the user has allowed with `torch.serialization.add_safe_globals`."""

    def __init__(self, storage: Callable[[Any], Any]) -> None:
        self.storage = storage
        self._allowed: dict[str, Any] = {}
        for item in torch.serialization.get_safe_globals():
            value, name = item if isinstance(item, tuple) else (item, f"{item.__module__}.{item.__qualname__}")
            self._allowed[name] = value

    def find(self, module: str, name: str) -> Any:
        """Return the value or the constructor of a name."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        known = _names()
        if full in known:
            return known[full]
        for value in (torch_constant(module, name), _storage_kind(module, name)):
            if value is not None:
                return value
        if full in self._allowed and not any(module == other or module.startswith(f"{other}.") for other in _NEVER):
            return self._allowed[full]
        raise UnsafeFileError(full)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call what the user has allowed."""
        self._require_allowed(function)
        if _name_of(function) in _NEVER_CALLED:
            raise UnsafeFileError(_name_of(function))
        return function(*arguments)

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Return a new object of a class that the user has allowed."""
        self._require_allowed(kind)
        require(isinstance(kind, type), "an object has no class")
        instance = kind.__new__(kind, *arguments)
        if not hasattr(kind, "__setstate__"):
            return instance

        def complete(state: Any) -> Any:  # until then an object of C++ has memory that nothing has initialised
            instance.__setstate__(state)
            return instance

        return PendingObject(complete)

    def build(self, instance: Any, state: Any) -> None:
        """Give a state to an object of an allowed class; an OrderedDict of weights may carry versions."""
        if type(instance) is OrderedDict:
            is_plain = type(state) is dict and state.keys() <= {"_metadata"}
            require(is_plain and _is_metadata(state.get("_metadata", {})), "a dictionary has attributes")
            if state:
                instance._metadata = state["_metadata"]  # type: ignore[attr-defined]
            return
        self._require_allowed(type(instance))
        if hasattr(instance, "__setstate__"):
            instance.__setstate__(state)
            return
        slots = None
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        for name, value in {**(state or {}), **(slots or {})}.items():
            object.__setattr__(instance, name, value)

    def _require_allowed(self, function: Any) -> None:
        if not any(function is allowed for allowed in self._allowed.values()):
            raise UnsafeFileError(_name_of(function))


def _is_metadata(value: Any) -> bool:
    """Tell whether a value is what `state_dict` says of the versions of modules: facts by the names of modules."""
    kinds = (dict, OrderedDict)
    return type(value) in kinds and all(type(name) is str and type(value[name]) in kinds for name in value)


def torch_constant(module: str, name: str) -> Any:
    """Return a dtype, a layout or a memory format of torch, or None for any other name."""
    value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
    return value if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else None


def _storage_kind(module: str, name: str) -> _StorageKind | None:
    if (module, name) in (("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")):
        return _StorageKind(torch.uint8)
    return _legacy_kinds().get(name) if module in ("torch", "torch.cuda") else None


@cache
def _legacy_kinds() -> dict[str, _StorageKind]:
    """Return the dtype of `torch.FloatStorage` and the like, which are names only."""
    kinds = {}
    for name in dir(torch):
        if name.endswith("Storage") and name not in ("TypedStorage", "UntypedStorage"):
            dtype = getattr(getattr(torch, name), "_dtype", None)
            if isinstance(dtype, torch.dtype):
                kinds[name] = _StorageKind(dtype)
    return kinds


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    require(type(storage) is _Storage, "a tensor has no storage")
    return _view(storage, storage.dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor_of_type(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    require(type(storage) is _Storage and isinstance(dtype, torch.dtype), "a tensor has no type")
    return _view(storage, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _view(
    storage: _Storage,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any,
) -> Tensor:
    shape, strides = _numbers(size), _numbers(stride)
    require(type(offset) is int and offset >= 0 and len(shape) == len(strides), "a tensor has no shape")
    require(not hooks, "a tensor has hooks")
    last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    needed = (last + 1) * dtype.itemsize if math.prod(shape) else 0
    require(needed <= storage.bytes.nbytes(), f"a tensor of shape {list(shape)} is larger than its storage")
    # Strides of 0 repeat numbers: a small file must not become a large tensor.
    require(
        math.prod(shape) * dtype.itemsize <= max(storage.bytes.nbytes(), _MOST_REPEATED_BYTES),
        "a tensor repeats its numbers",
    )
    tensor = torch.empty(0, dtype=dtype).set_(storage.bytes, offset, shape, strides)
    if metadata:
        require(type(metadata) is dict and metadata.keys() <= {"conj", "neg"}, "a tensor has attributes")
        require(dtype.is_complex or (dtype.is_floating_point and not metadata.get("conj")), "a tensor has attributes")
        tensor = tensor.conj() if metadata.get("conj") else tensor
        tensor = torch._neg_view(tensor) if metadata.get("neg") else tensor
    tensor.requires_grad_(requires_grad is True)
    return tensor


def _numbers(values: Any) -> tuple[int, ...]:
    is_shape = type(values) in (tuple, torch.Size) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )
    require(is_shape and len(values) <= 64, "a shape is not one")
    return tuple(values)


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> nn.Parameter:
    require(isinstance(data, Tensor) and not hooks, "a parameter has no values")
    parameter: nn.Parameter = _with_attributes(nn.Parameter(data, requires_grad is True), state)
    return parameter


def _with_attributes(tensor: Any, state: Any) -> Any:
    """Set attributes of a tensor that Python code has added; those that torch has are not set by a file."""
    if state:
        require(type(state) is dict, "a tensor has a state")
        for name, value in state.items():
            is_free = type(name) is str and not name.startswith("__") and not hasattr(Tensor, name)
            require(is_free and name not in _OWN_ATTRIBUTES, "a tensor has a state")
            require_finished(value)
            setattr(tensor, name, value)
    return tensor


def _tensor_of_class(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor with attributes, or one of an allowed class."""
    require(type(function) is Constructor and type(arguments) is tuple, "a tensor has no constructor")
    tensor = function.make(*arguments)
    if kind in (Tensor, nn.Parameter) and type(tensor) is kind:
        return _with_attributes(tensor, state)
    _require_allowed_class(kind)
    # torch sets them; a class has its own, but none of Python's, and no method of a tensor.
    for part in state if type(state) is tuple else [state]:
        require(part is None or type(part) is dict, "a tensor has a state")
        for name in part or ():
            is_free = type(name) is str and not name.startswith("__") and not callable(getattr(Tensor, name, None))
            require(is_free and name not in _OWN_ATTRIBUTES, "a tensor has a state")
    return torch._tensor._rebuild_from_type_v2(lambda: tensor, kind, (), state)  # type: ignore[no-untyped-call]


def _require_allowed_class(kind: Any) -> None:
    if not any(kind is allowed for allowed in torch.serialization.get_safe_globals() if isinstance(allowed, type)):
        raise UnsafeFileError(_name_of(kind))


def _name_of(item: Any) -> str:
    """Return the name of a class or a function; the text of any other value could be endless."""
    is_named = isinstance(item, type) or (callable(item) and hasattr(item, "__qualname__"))
    return f"{item.__module__}.{item.__qualname__}" if is_named else f"a call of {type(item).__name__}"


def _wrapper(kind: Any, *arguments: Any) -> Any:
    """Return a tensor of an allowed class that has others inside."""
    _require_allowed_class(kind)
    return torch._utils._rebuild_wrapper_subclass(kind, *arguments)  # type: ignore[no-untyped-call]


def _sparse(layout: Any, data: Any) -> Tensor:
    require(type(data) is tuple and len(data) in (3, 4), "a sparse tensor has no parts")
    if layout is torch.sparse_coo:
        indices, values, size, *rest = data
        require(isinstance(indices, Tensor) and isinstance(values, Tensor), "a sparse tensor has no parts")
        made = torch.sparse_coo_tensor(indices, values, _numbers(size), check_invariants=True)
        is_coalesced = bool(rest) and rest[0] is True and _is_sorted(indices, _numbers(size))
        return made._coalesced_(True) if is_coalesced else made
    require(all(isinstance(part, Tensor) for part in data[:3]), "a sparse tensor has no parts")
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, _numbers(size), layout=layout, check_invariants=True
    )


def _is_sorted(indices: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the places in a tensor of a shape are in order, and none is there twice."""
    place = torch.zeros(indices.shape[1], dtype=torch.int64)
    for row, length in zip(indices, shape[: len(indices)], strict=True):
        place = place * length + row
    return bool((place[1:] > place[:-1]).all())


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, parameters: Any, requires_grad: Any, hooks: Any
) -> Tensor:
    require(type(storage) is _Storage and not hooks, "a tensor has no storage")
    like = torch.int32 if storage.dtype == torch.qint32 else torch.uint8
    plain = _view(storage, like, offset, size, stride, False, hooks, None)  # which checks its bounds
    typed = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage.bytes, dtype=storage.dtype, _internal=True
    )
    require(
        type(parameters) is tuple and parameters[:1] in ((torch.per_tensor_affine,), (torch.per_channel_affine,)),
        "a tensor has no scale",
    )
    return torch._utils._rebuild_qtensor(  # type: ignore[no-untyped-call, no-any-return]
        typed, offset, tuple(plain.shape), plain.stride(), parameters, False, OrderedDict()
    )


def _on_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Tensor:
    require(isinstance(data, Tensor) and isinstance(dtype, torch.dtype), "a tensor has no values")
    require(data.dtype == dtype, "a tensor has another type than its values")
    tensor: Tensor = data.requires_grad_(requires_grad is True)
    return tensor


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Tensor:
    require(isinstance(dtype, torch.dtype), "a tensor has no type")
    return torch.empty_strided(
        _numbers(size), _numbers(stride), dtype=dtype, device="meta", requires_grad=requires_grad is True
    )


# --- NumPy ------------------------------------------------------------------------------------------------------------


def _dtype(code: Any, align: Any = False, copy: Any = True) -> PendingObject:
    """Return a type of numbers, texts or dates: none with objects or fields, whose state could forge pointers."""
    import numpy as np

    if type(code) is not str or _DTYPE_CODE.fullmatch(code) is None:
        raise UnsafeFileError(f"numpy.dtype({code!r})")

    def complete(state: Any) -> Any:
        require(type(state) is tuple and len(state) in (8, 9), "a dtype has no state")
        _, order, subarray, names, fields, size, _, _, *rest = state
        if (subarray, names, fields) != (None, None, None) or order not in ("<", ">", "|", "="):
            raise UnsafeFileError("a dtype of NumPy with fields")
        full = code
        if rest:
            full = f"{code}[{_unit(rest[0])}]" if rest[0] is not None else code
        made = np.dtype(full).newbyteorder(order) if order in "<>" else np.dtype(full)
        require(type(size) is int and size in (-1, made.itemsize) and made.itemsize > 0, "a dtype has another size")
        return made

    return PendingObject(complete)


def _unit(metadata: Any) -> str:
    require(type(metadata) is tuple and len(metadata) == 2 and not metadata[0], "a dtype has attributes")
    name, count, *_ = metadata[1]
    is_unit = type(name) is bytes and name in _UNITS and type(count) is int and 0 < count < 1 << 31
    require(is_unit, "a dtype of dates has no unit")
    return f"{count}{name.decode()}" if count > 1 else name.decode()


class _Array(NamedTuple):
    """Stands for the class of arrays, which is never called."""


def _array(kind: Any, shape: Any, code: Any) -> PendingObject:
    import numpy as np

    require(type(kind) is _Array, "an array has a class of its own")

    def complete(state: Any) -> Any:
        require(type(state) is tuple and len(state) == 5, "an array has no state")
        _, shape, dtype, is_fortran, content = state
        require(isinstance(dtype, np.dtype) and type(content) is bytes, "an array has no bytes")
        shape = _numbers(shape)
        require(math.prod(shape) * dtype.itemsize == len(content), "an array has another size than its bytes")
        flat = np.frombuffer(content, dtype) if content else np.zeros(math.prod(shape), dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")

    return PendingObject(complete)


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy as np

    require(isinstance(dtype, np.dtype) and type(content) is bytes, "a number of NumPy has no bytes")
    require(dtype.itemsize == len(content) > 0, "a number of NumPy has another size")
    return np.frombuffer(content, dtype)[0]


# --- Plain data -------------------------------------------------------------------------------------------------------


def _of(function: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """Return a constructor that takes arguments of exactly these types."""

    def make(*arguments: Any) -> Any:
        require(all(type(argument) in kinds for argument in arguments), f"{function.__name__} has other arguments")
        return function(*arguments)

    return make


def _set_of(function: type) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        require(type(items) in (list, tuple, set, frozenset), "a set has no items")
        require_keys(items)
        return function(items)

    return make


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    require(
        type(items) in (list, tuple) and all(type(item) in (list, tuple) for item in items), "a dictionary has no items"
    )
    pairs = [tuple(item) for item in items]
    require(all(len(pair) == 2 for pair in pairs), "a dictionary has no items")
    require_keys(key for key, _ in pairs)
    return OrderedDict(pairs)


def _counter(items: Any = None) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    require(items is None or type(items) is dict, "a counter has no items")
    for key, value in (items or {}).items():
        counts[key] = value
    return counts


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes are not written as torch writes them")
    return text.encode("latin1")  # type: ignore[no-any-return]


def _bytearray(*arguments: Any) -> bytearray:
    if not arguments:
        return bytearray()
    if type(arguments[0]) is str:
        return bytearray(_encoded(*arguments))
    require(len(arguments) == 1 and type(arguments[0]) is bytes, "bytes are not written as torch writes them")
    return bytearray(arguments[0])


def _fraction(*arguments: Any) -> Fraction:
    is_text = len(arguments) == 1 and type(arguments[0]) is str and re.fullmatch(r"-?\d+(/\d+)?", arguments[0])
    require(bool(is_text) or all(type(argument) is int for argument in arguments), "a fraction has other arguments")
    return Fraction(*arguments)


def _size(values: Any = ()) -> torch.Size:
    return torch.Size(_numbers(values))


@cache
def _names() -> dict[str, Any]:
    """Return the values and constructors of all names; classes that stand as values are not called."""
    import numpy as np  # noqa: F401 - what is read may need it

    date = _of(datetime.date, bytes, int)
    makers: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_type,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": lambda data, grad, hooks, state: _parameter(
            data, grad, hooks, state
        ),
        "torch._utils._rebuild_wrapper_subclass": _wrapper,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._utils._rebuild_qtensor": _quantized,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_cpu,
        "torch._utils._rebuild_meta_tensor_no_storage": _meta,
        "torch._tensor._rebuild_from_type_v2": _tensor_of_class,
        "torch.Size": _size,
        "torch.device": _of(torch.device, str, int),
        "torch.serialization._get_layout": _of(torch.serialization._get_layout, str),
        "numpy.dtype": _dtype,
        "numpy.core.multiarray._reconstruct": _array,
        "numpy._core.multiarray._reconstruct": _array,
        "numpy.core.multiarray.scalar": _scalar,
        "numpy._core.multiarray.scalar": _scalar,
        "_codecs.encode": _encoded,
        "builtins.bytearray": _bytearray,
        "builtins.complex": _of(complex, float, int),
        "builtins.set": _set_of(set),
        "builtins.frozenset": _set_of(frozenset),
        "builtins.range": _of(range, int),
        "builtins.slice": _of(slice, int, type(None)),
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "datetime.date": date,
        "datetime.datetime": _of(datetime.datetime, bytes, int, datetime.timezone, type(None)),
        "datetime.time": _of(datetime.time, bytes, int, datetime.timezone, type(None)),
        "datetime.timedelta": _of(datetime.timedelta, int),
        "datetime.timezone": _of(datetime.timezone, datetime.timedelta, str),
        "decimal.Decimal": _of(Decimal, str),
        "fractions.Fraction": _fraction,
    }
    for kind in (PurePosixPath, PosixPath):
        for module in ("pathlib", "pathlib._local"):  # the name in Python 3.13 only
            makers[f"{module}.{kind.__name__}"] = _of(kind, str)
    values: dict[str, Any] = {f"builtins.{kind.__name__}": kind for kind in (bool, int, float, str, list, tuple, dict)}
    values |= {"torch.Tensor": Tensor, "torch.nn.parameter.Parameter": nn.Parameter, "numpy.ndarray": _Array()}
    for scheme in ("per_tensor_affine", "per_channel_affine"):
        values[f"torch.{scheme}"] = getattr(torch, scheme)
    held = {name: _TENSOR if name.startswith("torch._") else _VALUE for name in makers}
    return values | {name: Constructor(name, make, held[name]) for name, make in makers.items()}
