"""Write the weights of a model as a folder of Hugging Face files while they are gathered."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.formats.model_files import (
    index_of,
    made,
    parse_size,
    remove_older_files,
    shards_of,
    write_index,
)
from ..checkpoint.formats.saving import atomic_write, flush
from ..runtime.group.runtime import Runtime
from .adapters import active_adapter, base_of, is_peft
from .naming import is_of_transformers, natural

if TYPE_CHECKING:
    from .weights import TensorMeta, Weights

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class SafetensorsWriter:
    """Writes one file of safetensors, whose tensors arrive one by one in any order."""

    def __init__(self, stream: BinaryIO, metas: Sequence[TensorMeta]) -> None:
        self._stream = stream
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places: dict[str, int] = {}
        offset = 0
        for meta in sorted(metas, key=lambda meta: (-meta.dtype.itemsize, meta.name)):  # as the library orders them
            size = nbytes_of(meta)
            header[meta.name] = {
                "dtype": _DTYPES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [offset, offset + size],
            }
            places[meta.name] = offset
            offset += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        stream.write(struct.pack("<Q", len(text)) + text)
        self._places = {name: 8 + len(text) + place for name, place in places.items()}
        stream.truncate(8 + len(text) + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place."""
        if tensor.numel():
            self._stream.seek(self._places.pop(name))
            self._stream.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def nbytes_of(meta: TensorMeta) -> int:
    """Return the size of a tensor in bytes."""
    size = meta.dtype.itemsize
    for length in meta.shape:
        size *= length
    return size


def save(
    weights: Weights, model: nn.Module, runtime: Runtime, folder: str | os.PathLike[str], limit: int | str
) -> None:
    """Write the files on the main process; the others take part in gathering. All raise if it could not write."""
    metas, error = weights.metadata(), None
    largest = parse_size(limit)
    pairs = iter(weights)
    if runtime.is_main_process:
        try:
            _write(pairs, metas, model, Path(folder), largest, adapter_only=weights.is_adapter)
        except Exception as found:  # the other processes wait for this one in the next gather
            error = found
    for _ in pairs:
        pass
    messages: list[Any] = [None if error is None else f"{type(error).__name__}: {error}"]
    if runtime.num_processes > 1:
        dist.broadcast_object_list(messages, src=0, device=runtime.device)
    if error is not None:
        raise error
    if messages[0] is not None:
        raise RuntimeError(f"Rank {runtime.process_index}: the main process could not write {folder}: {messages[0]}")


def _write(
    pairs: Any, metas: Sequence[TensorMeta], model: nn.Module, folder: Path, limit: int, *, adapter_only: bool
) -> None:
    stem, suffix = ("adapter_model" if adapter_only else "model"), ".safetensors"
    order = metas if adapter_only or not is_of_transformers(_plain(model)) else sorted(metas, key=_order)
    empty = {meta.name: torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in order}
    shards = shards_of(empty, limit)
    names = [
        f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        for number in range(1, len(shards) + 1)
    ]
    by_name = {meta.name: meta for meta in metas}
    with made(folder):
        with ExitStack() as stack:  # no file gets its name before all are written
            writers: dict[str, SafetensorsWriter] = {}
            for name, shard in zip(names, shards, strict=True):
                draft = stack.enter_context(atomic_write(folder / name))
                writer = SafetensorsWriter(stack.enter_context(draft.open("wb")), [by_name[each] for each in shard])
                writers |= dict.fromkeys(shard, writer)
            for name, tensor in pairs:
                writers[name].write(name, tensor)
        index = folder / f"{stem}{suffix}.index.json"
        if len(shards) > 1:
            contents = index_of(names, shards)
            if is_of_transformers(_plain(model)) and not adapter_only:
                contents["metadata"] = {"total_parameters": _plain(model).num_parameters(), **contents["metadata"]}  # type: ignore[operator]
            write_index(index, contents)
        _write_configs(model, folder, metas, adapter_only=adapter_only)
    flush(folder)
    remove_older_files(folder, stem, suffix, {*names, index.name} if len(shards) > 1 else set(names))


def _order(meta: TensorMeta) -> Any:
    return natural(meta.name)


def _plain(model: nn.Module) -> nn.Module:
    return base_of(model) if is_peft(model) else model


def _write_configs(model: nn.Module, folder: Path, metas: Sequence[TensorMeta], *, adapter_only: bool) -> None:
    """Write the configs beside the weights, as `save_pretrained` does."""
    peft_model: Any = model
    if adapter_only:
        config = deepcopy(peft_model.peft_config[active_adapter(model)])
        config.inference_mode = True
        config.save_pretrained(str(folder))
        return
    own: Any = _plain(model)
    if not is_of_transformers(own):
        return
    config = deepcopy(own.config)
    dtypes: Mapping[torch.dtype, None] = dict.fromkeys(meta.dtype for meta in metas if meta.dtype.is_floating_point)
    config.dtype = str(next(iter(dtypes), own.dtype)).removeprefix("torch.")
    config.architectures = [type(own).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    if own.can_generate() and getattr(own, "generation_config", None) is not None:
        own.generation_config.save_pretrained(str(folder))
