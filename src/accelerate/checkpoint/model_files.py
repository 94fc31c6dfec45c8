"""A whole model as files that every other tool reads: one file, or shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.origins import NOT_YET
from ..errors import UnsupportedSettingError
from ..runtime.progress import progress
from ..saving import clean_state_dict_for_safetensors, flush, written_whole
from . import codec
from .parts import with_ties

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Read a size such as `10GB` (decimal) or `2GiB` (binary), in bytes."""
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size={size!r} cannot be read: write a number of bytes, or 500MB, 10GB, 2GiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def save_model_files(
    state: Mapping[str, Any], folder: Path, *, max_shard_size: int | str, safe_serialization: bool
) -> list[str]:
    """Write a state as one file or as shards; the files of an earlier save are replaced when the new ones are there."""
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    tensors = clean_state_dict_for_safetensors(state) if safe_serialization else dict(state)
    shards = _shards(tensors, parse_size(max_shard_size))
    names = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # no shard takes its name before all are written
        for name, shard in zip(progress(names, "Saving the model", "files"), shards, strict=True):
            codec.write(shard, stack.enter_context(written_whole(folder / name)))
    index = folder / f"{stem}{suffix}.index.json"
    if len(shards) > 1:
        _write_index(index, names, shards)
    flush(folder)
    _remove_older_files(folder, stem, suffix, {*names, index.name} if len(shards) > 1 else set(names))
    return names


def _shards(tensors: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Fill shards in order; a tensor larger than the limit has one to itself."""
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
    with written_whole(index) as draft:
        draft.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _remove_older_files(folder: Path, stem: str, suffix: str, keep: set[str]) -> None:
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}(\.index\.json)?")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def read_model_files(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a model from a file, an index, or a folder with either."""
    path = Path(checkpoint)
    if path.is_dir():
        path = _main_file(path)
    if path.name.endswith(".index.json"):
        weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        outside = sorted(name for name in set(weight_map.values()) if Path(name).name != name)
        if outside:
            raise ValueError(f"{path} names files outside of its folder: {outside[0]!r}.")
        missing = sorted(name for name in set(weight_map.values()) if not (path.parent / name).is_file())
        if missing:
            raise FileNotFoundError(f"{path} lists shards that are not there: {', '.join(missing[:4])}.")
        state: dict[str, Any] = {}
        for name in progress(sorted(set(weight_map.values())), "Loading the model", "shards"):
            state |= codec.read(path.parent / name)
        return state
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    return dict(codec.read(path))


def _main_file(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        for candidate in (folder / f"{name}.index.json", folder / name):
            if candidate.is_file():
                return candidate
    found = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    if len(found) == 1:
        return found[0]
    raise FileNotFoundError(
        f"{folder} holds no model: expected model.safetensors, pytorch_model.bin, or one of them with .index.json."
    )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    **others: Any,
) -> None:
    """Load a model's weights from a file, an index or a folder, tied ones too.

    `dtype` converts floating-point weights, except in modules named in `keep_in_fp32_modules`.
    """
    if device_map is not None or offload_folder is not None or others:
        asked = "device_map" if device_map is not None else "offload_folder" if offload_folder else ", ".join(others)
        raise UnsupportedSettingError(f"load_checkpoint_in_model({asked}=...)", NOT_YET, "Leave it out.")
    state = read_model_files(checkpoint)
    if dtype is not None:
        number_format = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        kept = keep_in_fp32_modules or []
        for name, tensor in state.items():
            if tensor.is_floating_point():
                in_fp32 = any(part in name for part in kept)
                state[name] = tensor.to(torch.float32 if in_fp32 else number_format)
    model.load_state_dict(with_ties(state, model.state_dict()), strict=strict)
