"""Save one object to one file, atomically."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import mesh_of
from ...runtime.collectives.nested import recursively_apply
from ...runtime.devices import xla
from ...runtime.devices.device import is_xla
from ...runtime.group.runtime import Runtime

logger = logging.getLogger(__name__)

_NEARLY_FULL = 1 << 16


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on the main process, or on the first process of every host with `save_on_each_node`.

    The file appears only when it is complete. `safe_serialization` writes a dict of tensors as safetensors.
    """
    runtime = Runtime.current()
    if not (runtime.is_local_main_process if save_on_each_node else runtime.is_main_process):
        return
    path = os.fspath(f)
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"save() cannot write {path}: {directory} is not a directory. Create it first.")
    obj = on_host(obj)
    with atomic_write(path) as partial:
        if safe_serialization:
            from safetensors.torch import save_file  # on first use: importing the library stays quick

            save_file(clean_state_dict_for_safetensors(obj), partial, metadata={"format": "pt"})
        else:
            torch.save(obj, partial)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside a file; rename it to the file after the block, or delete it on an error."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}{path.suffix}")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    except Exception as error:
        if (number := _system_error(error, partial)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def _system_error(error: Exception, partial: Path) -> int | None:
    """Return the number of the system's error behind one that names no file; of torch and safetensors it is none."""
    if isinstance(error, OSError):
        return error.errno if error.filename is None else None
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is not None:
        return int(found[1])
    if is_full(partial.parent):
        return errno.ENOSPC
    return _refusal_of_more(partial) if "inline_container" in str(error) else None


def _refusal_of_more(partial: Path) -> int | None:
    """Return why the system takes no more bytes of a file, such as a quota, which torch's writer does not say."""
    try:
        with partial.open("ab", buffering=0) as file:
            file.write(bytes(1 << 20))
            file.write(b"x")  # the first write may be cut short
    except OSError as error:
        return error.errno
    return None


def is_full(folder: str | os.PathLike[str]) -> bool:
    """Tell whether the disk of a folder is full, which errors of torch and safetensors do not say."""
    return shutil.disk_usage(folder).free < _NEARLY_FULL


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a dict that safetensors accepts, and warn of the names of tied weights that it omits."""
    clean = deduplicate_storage(state_dict)
    removed = [name for name in state_dict if name not in clean]
    if removed:
        logger.warning(
            "Removed shared tensor %s while saving: the same memory is saved under another name. A model that ties "
            "these weights restores them when it loads; for any other, clone them first.",
            ", ".join(removed),
        )
    return clean


def deduplicate_storage(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a dict that safetensors accepts: contiguous tensors, each storage under one name.

    Of tied weights the first name is kept; a model that ties them restores the others when it loads.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"safe_serialization stores a dict of tensors, not a {type(state_dict).__name__}: give a state dict, or "
            "save with safe_serialization=False."
        )
    others = sorted(name for name, value in state_dict.items() if not isinstance(value, Tensor))
    if others:
        raise TypeError(
            f"safe_serialization stores tensors only, and these entries are not: {', '.join(others[:5])}. "
            "Remove them, or save with safe_serialization=False."
        )
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state_dict.items():
        kept.setdefault(storage_key(tensor) if tensor.numel() else (name,), name)
    chosen = {name: state_dict[name].detach() for name in kept.values()}
    return {
        name: tensor if _owns_its_storage(tensor) else tensor.clone().contiguous() for name, tensor in chosen.items()
    }


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tied tensors: the same storage, viewed in the same way.

    The key of a DTensor is its identity, because the local shard may be empty.
    """
    if mesh_of(tensor) is not None:
        return (id(tensor),)
    if is_xla(tensor.device):  # without an address
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def on_host(state: Any) -> Any:
    """Return a state with tensors of XLA copied to the host, where they have memory; tied ones stay tied."""
    if not is_xla(Runtime.current().device):
        return state
    generator = xla.get_rng_state()  # which a sync advances: a run that saves must go on like one that loads
    xla.sync()  # once: reading a tensor would run what it depends on, one by one
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if not is_xla(tensor.device):
            return tensor
        key = storage_key(tensor) if tensor.numel() else (id(tensor),)
        if key not in copies:
            copies[key] = tensor.detach().cpu()
        return copies[key]

    state = recursively_apply(copied, state)
    xla.set_rng_state(generator)
    return state


def _owns_its_storage(tensor: Tensor) -> bool:
    """Tell whether a tensor can be stored as it is: contiguous, and not a view of a larger storage."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and whole


def flush(path: str | os.PathLike[str]) -> None:
    """Flush a file or folder to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the identity of the storage of a tensor: device, address, size."""
    if is_xla(tensor.device):
        return tensor.device, tensor.untyped_storage()._cdata, tensor.nbytes
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
