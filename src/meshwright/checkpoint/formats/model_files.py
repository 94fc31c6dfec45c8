"""A whole model in the usual files of other tools: one file, or shards with an index."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import InvalidDataError
from ...runtime.loop.progress import progress
from ...untrusted import build, parse_object, printable, read_bytes, require_plain_name
from ..layout import numbered
from . import codec
from .saving import atomic_write, clean_state_dict_for_safetensors, flush, on_host

_LONGEST_INDEX = 1 << 28
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: float | str) -> int:
    """Read a size such as `10GB` (decimal) or `2GiB` (binary), in bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if found is not None and found[2].upper() in _UNITS:
        number = float(found[1]) * _UNITS[found[2].upper()]
    else:
        number = math.nan if isinstance(size, str) else size  # a fraction of a budget need not be an integer
    if not math.isfinite(number):
        raise ValueError(
            f"max_shard_size={size!r} is not in a valid format: write a number of bytes, or 500MB, 10GB, 2GiB."
        )
    return int(number)


def save_model_files(
    state: Mapping[str, Any], folder: Path, *, max_shard_size: int | str, safe_serialization: bool, index: int = 0
) -> list[str]:
    """Write a state as one file or as shards. Files of an earlier save are replaced once the new ones are complete.

    `index` numbers the models of one folder: `model.safetensors`, `model_1.safetensors`.
    """
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    stem = numbered(stem, index, "")
    state = on_host(state)
    tensors = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    shards = shards_of(tensors, parse_size(max_shard_size))
    names = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    with made(folder), ExitStack() as stack:  # no shard gets its name before all are written
        for name, shard in zip(progress(names, "Saving the model", "files"), shards, strict=True):
            codec.write(shard, stack.enter_context(atomic_write(folder / name)))
    index_file = folder / f"{stem}{suffix}.index.json"
    if len(shards) > 1:
        write_index(index_file, index_of(names, shards))
    flush(folder)
    remove_older_files(folder, stem, suffix, {*names, index_file.name} if len(shards) > 1 else set(names))
    return names


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it again if nothing could be written into it."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def shards_of(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Fill shards in order; a tensor larger than the limit gets its own shard."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_here = tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
        if shards[-1] and size + bytes_here > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += bytes_here
    return shards


def index_of(names: list[str], shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what says in which file each tensor is."""
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values() if isinstance(t, Tensor))
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def write_index(index: Path, contents: dict[str, Any]) -> None:
    """Write the index of a model in several files."""
    with atomic_write(index) as draft:
        draft.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def remove_older_files(folder: Path, stem: str, suffix: str, keep: set[str]) -> None:
    """Remove the files of an earlier save of a model of this name."""
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def read_model_files(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model from a file, an index, or a folder with either."""
    files = files_of_model(checkpoint)
    if len(files) == 1:
        return codec.read_state(files[0])
    state: dict[str, Any] = {}
    for path in progress(files, "Loading the model", "shards"):
        state |= codec.read_state(path)
    return state


def files_of_model(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files with the tensors of a model, given a file, an index, or a folder with either."""
    path = Path(checkpoint)
    if path.is_dir():
        path = _main_file(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if not path.name.endswith(".index.json"):
        return [path]
    what = f"the index {path}"
    contents = parse_object(read_bytes(path, what, most_bytes=_LONGEST_INDEX), what, most_bytes=_LONGEST_INDEX)
    weight_map = build(dict[str, str], contents.get("weight_map", contents), what)  # an index may be the map itself
    names = sorted({require_plain_name(name, what) for name in weight_map.values()})
    deeper = [name for name in names if "/" in name]
    if deeper:
        raise InvalidDataError(f"{what} names a file outside of its folder: {printable(deeper[0])!r}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} lists shards that do not exist: {', '.join(missing[:4])}.")
    return [path.parent / name for name in names]


def _main_file(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        for candidate in (folder / f"{name}.index.json", folder / name):
            if candidate.is_file():
                return candidate
    indices = sorted(folder.glob("*.index.json"))
    if len(indices) > 1:
        raise ValueError(
            f"{folder} holds more than one `.index.json` file ({', '.join(path.name for path in indices)}): give the "
            "path of one of them."
        )
    found = indices or sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    if len(found) == 1:
        return found[0]
    raise FileNotFoundError(
        f"{folder} holds no model: expected model.safetensors, pytorch_model.bin, or an index that ends in .index.json."
    )
