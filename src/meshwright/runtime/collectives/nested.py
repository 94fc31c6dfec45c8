"""Walk, move, slice and describe nested containers of tensors. Nothing here communicates.

Containers are mappings (dicts, `UserDict`s, model outputs), lists, tuples, namedtuples and dataclasses; every
container comes back as its own type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


@dataclasses.dataclass
class TensorInformation:
    """The shape and dtype of a tensor, for another process to allocate one like it."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Return whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether this describes a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Return whether this is an instance of a namedtuple class."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence of the same type as `obj`, namedtuples included."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def honor_mapping(obj: Any, items: dict[Any, Any]) -> Any:
    """Build a mapping of the same type as `obj`, defaultdicts included."""
    return type(obj)(obj.default_factory, items) if isinstance(obj, defaultdict) else type(obj)(items)


def map_children(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to the direct children of a container; return None for a leaf."""
    if isinstance(data, (list, tuple)):
        return honor_type(data, [function(child) for child in data])
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: function(child) for key, child in data.items()})
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: function(getattr(data, f.name)) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **fields)
    return None


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of the tested type, keeping the containers around them.

    Other leaves are returned as they are, or refused with `error_on_other_type`.
    """
    return _applied(data, lambda leaf: func(leaf, *args, **kwargs), test_type, func if error_on_other_type else None)


def _applied(
    node: Any, func: Callable[[Any], Any], test_type: Callable[[Any], bool], strict: Callable[..., Any] | None
) -> Any:
    # A function that refers to itself would be a reference cycle, and keep what `func` refers to until a collection.
    if test_type(node):
        return func(node)
    mapped = map_children(lambda child: _applied(child, func, test_type, strict), node)
    if mapped is not None:
        return mapped
    if strict is not None:
        name = getattr(strict, "__name__", "This operation").strip("_")
        raise TypeError(
            f"{name}() takes tensors, or lists, tuples, mappings and dataclasses of tensors; it found a "
            f"{type(node).__name__}: {str(node)[:80]!r}. Use gather_object() for objects."
        )
    return node


def named_leaves(data: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a nested container, left to right, each with its path such as `['labels'][0]`."""
    children = _children(data)
    if children is None:
        return [(name, data)]
    return [leaf for key, child in children for leaf in named_leaves(child, f"{name}[{key!r}]")]


def leaves(data: Any) -> list[Any]:
    """Return the leaves of a nested container, left to right."""
    children = _children(data)
    if children is None:
        return [data]
    return [leaf for _, child in children for leaf in leaves(child)]


def tensors_of(data: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested container, left to right."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor)]


def _children(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the direct children of a container with their keys, or None for a leaf."""
    if isinstance(data, torch.Tensor):  # first, because it is the usual leaf
        return None
    if isinstance(data, (list, tuple)):
        return enumerate(data)
    if isinstance(data, Mapping):
        return data.items()
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return [(f.name, getattr(data, f.name)) for f in dataclasses.fields(data) if f.init]
    return None


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: list[str] | str | None = None,
) -> Any:
    """Move every tensor of a nested container to a device.

    Objects with a `to` method of their own (a tokenizer's batch, for example) are moved by it. Mapping keys in
    `skip_keys` stay where they are.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if hasattr(tensor, "to") and not isinstance(tensor, type):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # its `to` takes no non_blocking
            return tensor.to(device)
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if skipped and isinstance(tensor, Mapping):
        return honor_mapping(
            tensor,
            {
                key: child if key in skipped else send_to_device(child, device, non_blocking, skip_keys)
                for key, child in tensor.items()
            },
        )
    moved = map_children(lambda child: send_to_device(child, device, non_blocking, skip_keys), tensor)
    return tensor if moved is None else moved


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.dim() else None
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor found, or None."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return None


def listify(data: Any) -> Any:
    """Turn every tensor into plain Python numbers and lists."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def get_shape(data: Any) -> Any:
    """Return the containers with every tensor replaced by its shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """Return the containers with every tensor replaced by its shape and dtype."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Allocate uninitialised tensors for a structure made by `get_data_structure`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take the same slice of every tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Concatenate like-shaped nested containers tensor by tensor; a single one is returned as it is."""
    first = data[0]
    if len(data) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, [concatenate([item[i] for item in data], dim=dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([item[key] for item in data], dim=dim) for key in first})
    raise TypeError(
        f"Can only concatenate tensors but got {type(first)}: give concatenate() tensors or containers of tensors."
    )


_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def convert_to_fp32(tensor: Any) -> Any:
    """Turn every fp16 or bf16 tensor into fp32."""
    if isinstance(tensor, torch.Tensor):
        return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor
    return recursively_apply(
        torch.Tensor.float,
        tensor,
        test_type=lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW_PRECISION,
    )


class ConvertOutputsToFp32:
    """Wrap a forward function so that what it returns is fp32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward function and convert its result."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function so that what it returns is fp32."""
    return ConvertOutputsToFp32(model_forward)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of nested data, or None where it has none."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Write a nested dict into another, level by level, and return that; values of the source take precedence."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
