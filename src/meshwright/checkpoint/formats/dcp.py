"""Read the folders of torch's DCP as data: the table of contents, and the tensors of the files that it names.

DCP itself unpickles both. Here the table is interpreted with the names that it has ([Note: pickles] in pickles.py), and
checked before anything is read or allocated: the chunks of a tensor fill it exactly, and each is in a file of the
folder, at a place of its own.

[Note: corners] Chunks fill a tensor exactly if they do not overlap and leave no gap. The sum of the indicator functions
of the chunks is then that of the whole, and so are their mixed differences, which are not 0 at corners only: each box
adds +1 or -1 at its corners, by the parity of how many of its upper bounds meet there. So it is enough to count these
signs, in time proportional to the number of chunks; it proves the same as comparing each chunk with each other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...errors import InvalidDataError, UnsafeFileError
from ...runtime.streams.mapping import MappedFile
from ...untrusted import MOST_HELD, printable, read_bytes, require_plain_name
from .objects import Records, torch_constant
from .pickles import Constructor, PendingObject, interpret, require

TABLE = ".metadata"
_MOST_TABLE_BYTES = 1 << 31
_MOST_DIMENSIONS = 16
_ENTRY_BYTES = 160  # of an object of the table in Python
_MOST_SPLIT_DIMENSIONS = 5


class SafeReader(FileSystemReader):
    """Read DCP's files as data."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._files: dict[str, MappedFile] = {}

    @cached_property
    def contents(self) -> Metadata:
        """The checked table of contents."""
        path = self.folder / TABLE
        program = read_bytes(path, "the table of a sharded checkpoint", most_bytes=_MOST_TABLE_BYTES)
        # A chunk takes a kilobyte in a file, and less in the table.
        num_bytes = len(program) + sum(file.stat().st_size for file in self.folder.glob("*.distcp"))
        contents = interpret(program, _TableNames(), str(path), most_held=MOST_HELD + 2 * num_bytes)
        if type(contents) is not Metadata:
            raise InvalidDataError(f"{path} is damaged: it is no table of a sharded checkpoint")
        try:
            _require_sound(contents, self.folder)
        except InvalidDataError as error:
            raise InvalidDataError(f"{path} is damaged: {error}") from None
        contents.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return contents

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The type, size and chunks of every tensor."""
        entries = self.contents.state_dict_metadata.items()
        return {name: facts for name, facts in entries if isinstance(facts, TensorStorageMetadata)}

    @cached_property
    def _sizes(self) -> dict[MetadataIndex, torch.Size]:
        entries = self.tensors.items()
        return {MetadataIndex(name, chunk.offsets): chunk.sizes for name, facts in entries for chunk in facts.chunks}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents."""
        return self.contents

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of tensors that a plan wants."""
        for item in plan.items:
            chunk = self._chunk(item)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Tensor:
        """Return a view of a chunk in its file."""
        index = item.storage_index
        place, dtype = self.contents.storage_data[index], self.tensors[index.fqn].properties.dtype
        path = self.folder / place.relative_path
        if place.relative_path not in self._files:
            self._files[place.relative_path] = MappedFile(path)
        what = f"{index.fqn} in {path}"
        content = self._files[place.relative_path].bytes[place.offset : place.offset + place.length]
        chunk = Records(content, what).read()
        if type(chunk) is not Tensor or (chunk.dtype, chunk.shape) != (dtype, self._sizes[index]):
            expected = f"{dtype} of {list(self._sizes[index])}"
            raise InvalidDataError(f"{what} is damaged: it is not the {expected} of the table")
        return chunk.detach()


class TensorPlanner(DefaultLoadPlanner):
    """Load tensors only: DCP would unpickle other values."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse what is no tensor."""
        raise UnsafeFileError(f"{read_item.dest_index.fqn} is no tensor in the sharded checkpoint")


# --- The table --------------------------------------------------------------------------------------------------------


class _TableNames:
    """The names in a table of contents."""

    def find(self, module: str, name: str) -> Any:
        """Return the value or the constructor of a name."""
        found = _constructors().get(f"{module}.{name}")
        if found is None:
            found = torch_constant(module, name)
        if found is None:
            raise UnsafeFileError(f"{module}.{name}")
        return found

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Refuse: only constructors are called."""
        raise UnsafeFileError(f"a call of {type(function).__name__}")

    def new(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Refuse: only constructors are called."""
        raise UnsafeFileError(f"an object of {type(kind).__name__}")

    def build(self, instance: Any, state: Any) -> None:
        """Refuse: nothing gets a state but a draft."""
        raise UnsafeFileError(f"the state of {type(instance).__name__}")

    def storage(self, key: Any) -> Any:
        """Refuse: a table has no numbers."""
        raise UnsafeFileError("a storage")


@cache
def _constructors() -> dict[str, Constructor]:
    """Return the constructors of all names: each makes a new object of checked values."""
    drafts: dict[str, Callable[[Any], Any]] = {
        "ChunkStorageMetadata": _chunk_of,
        "Metadata": _metadata_of,
        "MetadataIndex": _index_of,
        "StorageMeta": lambda _: None,  # identifiers of the save, which nothing reads
        "TensorProperties": _properties_of,
        "TensorStorageMetadata": _tensor_of,
    }
    makers: dict[str, Callable[..., Any]] = {
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata": dcp.BytesStorageMetadata,
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _format_of,
        "torch.distributed.checkpoint.filesystem._StorageInfo": lambda: PendingObject(_place_of),
        "torch.Size": _size_of,
        "torch.serialization._get_layout": lambda name: torch_constant("torch", str(name).removeprefix("torch.")),
        "collections.OrderedDict": OrderedDict,
    }
    for name, complete in drafts.items():
        makers[f"torch.distributed.checkpoint.metadata.{name}"] = _drafting(complete)
    for path in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
        for module in ("pathlib", "pathlib._local"):  # the name in Python 3.13 only
            makers[f"{module}.{path}"] = lambda *parts: "/".join(map(str, parts))
    return {name: Constructor(name, make, _ENTRY_BYTES) for name, make in makers.items()}


def _drafting(complete: Callable[[Any], Any]) -> Callable[[], PendingObject]:
    return lambda: PendingObject(complete)


def _fields(state: Any, required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the values of fields that have exactly these types, in this order."""
    require(type(state) is dict and all(name in state for name in required), "an entry lacks a field")
    kinds = {**required, **(optional or {})}
    require(state.keys() <= kinds.keys(), "an entry has an unknown field")
    for name, value in state.items():
        kind = kinds[name]
        require(type(value) in (kind if type(kind) is tuple else (kind,)), f"{name} is of type {type(value).__name__}")
    return [state.get(name) for name in kinds]


def _size_of(numbers: Any = ()) -> torch.Size:
    require(type(numbers) in (tuple, torch.Size) and len(numbers) <= _MOST_DIMENSIONS, "a size is not one")
    require(all(type(number) is int and 0 <= number < 1 << 48 for number in numbers), "a size is not one")
    return torch.Size(numbers)


def _format_of(number: Any) -> Any:
    require(type(number) is int, "a memory format is not one")
    return dcp._MEM_FORMAT_ENCODING(number)


def _chunk_of(state: Any) -> dcp.ChunkStorageMetadata:
    offsets, sizes = _fields(state, {"offsets": torch.Size, "sizes": torch.Size})
    return dcp.ChunkStorageMetadata(offsets=offsets, sizes=sizes)


def _properties_of(state: Any) -> dcp.TensorProperties:
    require(type(state) is tuple and len(state) in (5, 6), "a tensor has other properties")  # 6: torch 2.15
    dtype = state[0]
    require(type(dtype) is torch.dtype, "a tensor has no dtype")
    return dcp.TensorProperties(dtype=dtype)  # the others are deprecated, and nothing reads them


def _tensor_of(state: Any) -> TensorStorageMetadata:
    kinds = {"properties": dcp.TensorProperties, "size": torch.Size, "chunks": list}
    properties, size, chunks = _fields(state, kinds)
    require(all(type(chunk) is dcp.ChunkStorageMetadata for chunk in chunks), "a chunk is not one")
    return TensorStorageMetadata(properties=properties, size=size, chunks=list(chunks))


def _index_of(state: Any) -> MetadataIndex:
    kinds = {"offset": (torch.Size, type(None)), "index": (int, type(None))}
    name, offset, index = _fields(state, {"fqn": str}, kinds)
    return MetadataIndex(name, offset, index)


def _place_of(state: Any) -> _StorageInfo:
    kinds = {"relative_path": str, "offset": int, "length": int}
    path, offset, length, transforms = _fields(state, kinds, {"transform_descriptors": (list, tuple, type(None))})
    require(not transforms, "its files are transformed, by compression for example, which is not supported")
    require(0 <= offset < 1 << 62 and 0 <= length < 1 << 62, "a place in a file is not one")
    if "/" in require_plain_name(path, "the table"):
        raise InvalidDataError(f"it names a file outside of its folder: {printable(path)!r}")
    return _StorageInfo(path, offset, length)


def _metadata_of(state: Any) -> Metadata:
    mapping = (dict, OrderedDict)
    kinds = {"planner_data": Any, "storage_meta": type(None), "version": (str, type(None))}
    state = {name: value for name, value in state.items() if name != "planner_data"} if type(state) is dict else state
    entries, places, *_ = _fields(state, {"state_dict_metadata": mapping, "storage_data": mapping}, kinds)
    entry_kinds = (TensorStorageMetadata, dcp.BytesStorageMetadata)
    require(all(type(n) is str and type(entry) in entry_kinds for n, entry in entries.items()), "an entry is not one")
    is_place = all(type(index) is MetadataIndex and type(place) is _StorageInfo for index, place in places.items())
    require(is_place, "a place in a file is not one")
    return Metadata(state_dict_metadata=dict(entries), storage_data=dict(places))


# --- What the table says ----------------------------------------------------------------------------------------------


def _require_sound(contents: Metadata, folder: Path) -> None:
    """Refuse tensors with gaps, and chunks that are not in the files, or that share a place."""
    used: dict[str, list[tuple[int, int]]] = {}
    for name, facts in contents.state_dict_metadata.items():
        if not isinstance(facts, TensorStorageMetadata):
            continue
        require(_fill(facts.size, facts.chunks), f"the chunks of {printable(name)} do not fill it")
        for chunk in facts.chunks:
            place = contents.storage_data.get(MetadataIndex(name, chunk.offsets))
            require(place is not None, f"a chunk of {printable(name)} is in no file")
            num_bytes = math.prod(chunk.sizes) * facts.properties.dtype.itemsize
            require(num_bytes <= place.length, f"a chunk of {printable(name)} is larger than its place in the file")
            used.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
    for file, places in used.items():
        path = folder / file
        require(path.is_file(), f"{file} is missing")
        places.sort()
        ends_in_order = all(first[1] <= second[0] for first, second in itertools.pairwise(places))
        require(ends_in_order, f"two chunks are at the same place of {file}")
        require(places[-1][1] <= path.stat().st_size, f"{file} is too short")


def _fill(size: torch.Size, chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    """Tell whether chunks fill a tensor exactly: [Note: corners]."""
    if not all(len(chunk.offsets) == len(chunk.sizes) == len(size) for chunk in chunks):
        return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    if 0 in size:
        return True
    # Few dimensions are split: the corners of many would be too many to count.
    split = [dim for dim, length in enumerate(size) if _is_split(dim, length, chunks)]
    require(len(split) <= _MOST_SPLIT_DIMENSIONS, "a tensor is split in too many dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    _add_corners(corners, [0] * len(split), [size[dim] for dim in split], -1)
    for chunk in chunks:
        _add_corners(corners, [chunk.offsets[dim] for dim in split], [chunk.sizes[dim] for dim in split], 1)
    return not any(corners.values())


def _is_split(dim: int, length: int, chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    return any((chunk.offsets[dim], chunk.sizes[dim]) != (0, length) for chunk in chunks)


def _add_corners(corners: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int], sign: int) -> None:
    if 0 in sizes:
        return  # without elements
    bounds = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    for ends in itertools.product((0, 1), repeat=len(bounds)):
        corner = tuple(bound[end] for bound, end in zip(bounds, ends, strict=True))
        corners[corner] += sign * (-1) ** sum(ends)
