"""A whole model in the usual files of other tools: one file, or shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from ...runtime.loop.progress import progress
from . import codec
from .saving import atomic_write, clean_state_dict_for_safetensors, flush, on_host

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: float | str) -> int:
    """Read a size such as `10GB` (decimal) or `2GiB` (binary), in bytes."""
    if isinstance(size, (int, float)):  # a fraction of a budget need not be an integer
        return int(size)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(
            f"max_shard_size={size!r} is not in a valid format: write a number of bytes, or 500MB, 10GB, 2GiB."
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


def save_model_files(
    state: Mapping[str, Any], folder: Path, *, max_shard_size: int | str, safe_serialization: bool
) -> list[str]:
    """Write a state as one file or as shards. Files of an earlier save are replaced once the new ones are complete."""
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    state = on_host(state)
    tensors = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    shards = _shards(tensors, parse_size(max_shard_size))
    names = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # no shard gets its name before all are written
        for name, shard in zip(progress(names, "Saving the model", "files"), shards, strict=True):
            codec.write(shard, stack.enter_context(atomic_write(folder / name)))
    index = folder / f"{stem}{suffix}.index.json"
    if len(shards) > 1:
        _write_index(index, names, shards)
    flush(folder)
    _remove_older_files(folder, stem, suffix, {*names, index.name} if len(shards) > 1 else set(names))
    return names


def _shards(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
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


def _write_index(index: Path, names: list[str], shards: list[dict[str, Any]]) -> None:
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values() if isinstance(t, Tensor))
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    contents = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with atomic_write(index) as draft:
        draft.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _remove_older_files(folder: Path, stem: str, suffix: str, keep: set[str]) -> None:
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def read_model_files(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model from a file, an index, or a folder with either."""
    files = files_of_model(checkpoint)
    if len(files) == 1:
        return dict(codec.read(files[0]))
    state: dict[str, Any] = {}
    for path in progress(files, "Loading the model", "shards"):
        state |= codec.read(path)
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
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    weight_map = contents.get("weight_map", contents)  # an index may be the map itself
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} is not an index of a model: it does not map names of tensors to files.")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{path} names files outside of its folder: {outside[0]!r}.")
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
