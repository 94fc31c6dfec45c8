"""Offloaded weights: files on disk, read in place, and state dicts.

Two kinds of files are read. A folder of `.dat` files, one per weight, has an `index.json` with their dtypes and shapes.
A safetensors file is used where it is; the index then names it: `{"safetensors_file": ..., "weight_name": ...}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.formats import codec
from ...errors import InvalidDataError
from ...runtime.devices.device import is_cpu
from ...runtime.streams.mapping import MappedFile, read_into, release_pages
from ...untrusted import build, can_be_encoded, parse_object, printable, read_json, require_plain_name
from ..tensors import proper_dtype

Index = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _IndexEntry:
    """What an index says of one weight."""

    dtype: str | None = None
    shape: list[int] | None = None
    safetensors_file: str | None = None
    weight_name: str | None = None


INDEX = "index.json"
_LONGEST_HEADER = 100_000_000

_SAFETENSORS_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


class TensorFile:
    """A file with many tensors, each of which is read on use."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> TensorFile:
        """Open a safetensors file or a file of `torch.save`."""
        return SafetensorsFile(path) if Path(path).suffix == ".safetensors" else TorchFile(path)

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        raise NotImplementedError

    def view(self, name: str) -> Tensor:
        """Return a tensor that is read on use."""
        raise NotImplementedError

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor to the target, and release its pages."""
        source = self.view(name)
        with torch.no_grad():
            target.detach().copy_(source)
        release_pages(source)


class SafetensorsFile(TensorFile):
    """A safetensors file: eight bytes with the length of a JSON header, the header, the numbers.

    The library checks it; its header is then read once more for the places of the tensors, which the library keeps.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        codec.require_sound_safetensors(self.path)
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(length), f"the header of {self.path}", most_bytes=_LONGEST_HEADER)
        header.pop("__metadata__", None)
        self._start = 8 + length
        self._header = header
        self._file = MappedFile(self.path)

    def names(self) -> list[str]:
        """Return the names in the order of the file."""
        return sorted(self._header, key=lambda name: int(self._header[name]["data_offsets"][0]))

    def _entry(self, name: str) -> Any:
        if name not in self._header:
            raise InvalidDataError(f"{self.path} holds no weight {printable(name)!r}")
        return self._header[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        code = self._entry(name)["dtype"]
        found = getattr(torch, _SAFETENSORS_DTYPES.get(code, ""), None)
        if found is None:
            raise InvalidDataError(
                f"{self.path} holds {printable(name)} in {printable(str(code))}, a dtype that this version of torch "
                "does not have."
            )
        return found  # type: ignore[no-any-return]

    def view(self, name: str) -> Tensor:
        """Return a view of the file."""
        entry = self._entry(name)
        return self._file.tensor(self.dtype(name), entry["shape"], self._start + entry["data_offsets"][0])

    def read_into(self, name: str, target: Tensor) -> None:
        """Read directly into a CPU tensor of the same dtype; others get a copy."""
        is_same = target.dtype == self.dtype(name) and target.is_contiguous() and is_cpu(target.device)
        if is_same and list(target.shape) == self._header[name]["shape"]:
            read_into(self.path, self._start + self._header[name]["data_offsets"][0], target)
        else:
            super().read_into(name, target)


class TorchFile(TensorFile):
    """A file of `torch.save`, mapped if its format allows it: that before torch 1.6 does not."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._state: dict[str, Tensor] = codec.read_state(self.path, mmap=True)

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return [name for name, value in self._state.items() if isinstance(value, Tensor)]

    def view(self, name: str) -> Tensor:
        """Return a tensor of the file."""
        return self._state[name]


# --- The folder of .dat files -----------------------------------------------------------------------------------------


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Write a temporary file and rename it, because a model may still have the old one mapped."""
    draft = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def offload_weight(weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Any = None) -> Any:
    """Write one weight into a folder, add its dtype and shape to the index, and return the index."""
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = weight.detach().cpu().contiguous()
    with _replaced(folder / f"{weight_name}.dat") as draft:
        raw = data.reshape(-1).view(torch.uint8) if data.numel() else data
        raw.numpy().tofile(draft)
    if index is not None:
        index[weight_name] = {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return a mapped weight of such a folder: it is read on use, and writing to it does not change the file."""
    missing = {"dtype", "shape"} - weight_info.keys()
    if missing:
        raise InvalidDataError(f"the index lacks {' and '.join(sorted(missing))} of {weight_file}")
    return MappedFile(weight_file).tensor(proper_dtype(weight_info["dtype"]), weight_info["shape"])


def save_offload_index(index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Write the index of a folder; entries of an earlier index for other weights are kept."""
    if not index:
        return
    write_index(read_index(offload_folder) | dict(index), offload_folder)


def read_index(folder: str | os.PathLike[str]) -> Index:
    """Return the index of a folder, empty if there is none."""
    path = Path(folder) / INDEX
    return _index_of(path) if path.is_file() else {}


def _index_of(path: Path) -> Index:
    """Return the index in a file; raise InvalidDataError if it is not one."""
    what = f"the index {path}"
    found = build(dict[str, _IndexEntry], read_json(path, what, most_bytes=_LONGEST_HEADER), what)
    for name, entry in found.items():
        for text in (name, entry.safetensors_file or ""):
            if "\0" in text or not can_be_encoded(text):
                raise InvalidDataError(f"{what} has a name that no file can have: {printable(text)!r}")
    return {
        name: {field: value for field, value in asdict(entry).items() if value is not None}
        for name, entry in found.items()
    }


def write_index(index: Index, folder: str | os.PathLike[str]) -> None:
    """Write the index of a folder, replacing an earlier one."""
    with _replaced(Path(folder) / INDEX) as draft:
        draft.write_text(json.dumps(index, indent=2), encoding="utf-8")


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write the weights of a state dict into a folder, with their index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: Index = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to some modules."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}." if name else "") for name in submodule_names)
    }


# --- What hooks read from ---------------------------------------------------------------------------------------------


class PrefixedDataset(Mapping[str, Any]):
    """The weights of one module, by names relative to it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, Any]):
    """Weights by name, from a state dict in memory, a folder, or safetensors files that an index names.

    Files are mapped once. A tied weight may be stored under one of its names only; `aliases` maps the others to it.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("Give a state_dict, a save_folder, or an index: there is nowhere to load weights from.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            path = Path(save_folder) / INDEX
            if not path.is_file():
                raise FileNotFoundError(f"{save_folder} has no {INDEX}, so it holds no offloaded weights.")
            index = _index_of(path)
        self.index: Mapping[str, Any] = {} if index is None else index
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device
        self.aliases: dict[str, str] = {}
        self._files: dict[str, SafetensorsFile] = {}
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Any:
        found = self.stored(key)
        return found if self.device is None or key in self.state_dict else found.to(self.device)

    def stored(self, key: str) -> Tensor:
        """Return the stored weight: in memory, or mapped."""
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self.index and key in self.aliases:
            return self.stored(self.aliases[key])
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._mapped(key, self.index[key])
        return view

    def _mapped(self, key: str, info: Mapping[str, Any]) -> Tensor:
        if "safetensors_file" not in info:
            if self.save_folder is None:
                raise ValueError(f"The index lists {key} without a safetensors_file: give the save_folder of its file.")
            file_name = require_plain_name(f"{key}.dat", f"the index of {self.save_folder}")
            return load_offloaded_weight(Path(self.save_folder) / file_name, info)
        path = str(info["safetensors_file"])
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = SafetensorsFile(path)
        found = file.view(info.get("weight_name", key))
        return found.to(proper_dtype(info["dtype"])) if "dtype" in info else found

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def load_offloaded_weights(model: Any, index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Load the weights of a folder into a model, on the CPU."""
    from ..tensors import set_module_tensor_to_device

    for name, info in (index or {}).items():
        file_name = require_plain_name(f"{name}.dat", f"the index of {offload_folder}")
        value = load_offloaded_weight(Path(offload_folder) / file_name, info).clone()
        set_module_tensor_to_device(model, name, "cpu", value=value)
