"""The sizes of the parts of a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.formats.model_files import parse_size
from ..tensors import proper_dtype

_BITS_OF_CUSTOM = {"fp8": 8, "int4": 4, "int2": 2}


def dtype_byte_size(dtype: Any) -> float:
    """Return the bytes of one element; a bool counts as one bit, as published."""
    if isinstance(dtype, Enum):
        return _whole(_BITS_OF_CUSTOM[str(dtype.value)] / 8)
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    bits = re.search(r"(\d+)(?!.*\d)", str(dtype))
    if bits is None:
        raise ValueError(f"{dtype!r} is not a dtype: its name says no number of bits.")
    return _whole(int(bits[1]) / 8)


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def convert_file_size_to_int(size: float | str) -> int:
    """Read a size such as `10GB` (decimal) or `2GiB` (binary), in bytes."""
    try:
        return parse_size(size)
    except ValueError:
        raise ValueError(
            f"The size {size!r} is not in a valid format: write a number of bytes, or 500MB, 10GB, 2GiB."
        ) from None


def tensor_size(tensor: Tensor, name: str = "", dtype: Any = None, special_dtypes: Mapping[str, Any] = {}) -> int:
    """Return the bytes of a tensor, in its own or in another dtype.

    `dtype` applies to floating-point tensors, and only if it is smaller; `special_dtypes` gives the dtype by name.
    """
    special = special_dtypes.get(name)
    if special is not None:
        return int(tensor.numel() * dtype_byte_size(proper_dtype(special)))
    size = tensor.element_size()
    if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
        return int(tensor.numel() * min(dtype_byte_size(proper_dtype(dtype)), size))
    return tensor.numel() * size


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of the model (""), of each module and of each tensor, by name; tied tensors count once."""
    sizes: dict[str, int] = defaultdict(int)
    named = list(model.named_buffers())
    for name, tensor in named if buffers_only else [*model.named_parameters(), *named]:
        size = tensor_size(tensor, name, dtype, special_dtypes or {})
        sizes[""] += size
        end = name.find(".")
        while end >= 0:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> int:
    """Return the bytes of all buffers of a model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that are no prefix of another name."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name not in parents and name]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the size of the largest layer, and the names of all of that size.

    A layer is computed on one device: a module without children, or of a class that is not split.
    """
    whole = as_classes(no_split_module_classes)
    largest, names = 0, []
    pending = list(modules)
    while pending:
        name, module = pending.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in whole:
            pending = [(f"{name}.{child_name}", child) for child_name, child in children] + pending
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest and size:
            names.append(name)
    return largest, names


def as_classes(names: str | Sequence[str] | None) -> frozenset[str]:
    """Convert one name, several, or none to a set."""
    return frozenset([names] if isinstance(names, str) else names or ())


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and of its largest layer with its names."""
    sizes = compute_module_sizes(model)
    classes = as_classes(getattr(model, "_no_split_modules", None))
    return sizes[""], get_max_layer_size(list(model.named_children()) or [("", model)], sizes, sorted(classes))


def convert_bytes(size: float) -> str:
    """Format a number of bytes in units of 1024: `1.5 GB`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
