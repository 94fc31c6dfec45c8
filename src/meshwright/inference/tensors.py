"""The tensors of a module: list them, replace them one by one, and tie them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidDataError
from ..runtime.devices.device import accelerator_type, clear_device_cache, is_cpu
from ..runtime.modules import owner_of, tied_names
from ..untrusted import printable

Device = torch.device | str | int
META = torch.device("meta")
READS_CHILD_WEIGHTS = (nn.MultiheadAttention,)
"""Modules that read the weights of their children without calling them, so that all must be on one device at once."""
TiedTensors = dict[int, dict[Any, Tensor]]
"""Data pointer of a tied tensor -> its copies by device, so that no device holds two copies."""


def as_device(device: Device) -> torch.device:
    """Convert a name or an index to a device; an index is that of an accelerator."""
    if isinstance(device, int):
        kind = accelerator_type()
        if kind is None:
            raise ValueError(
                f"Device {device} was requested, and this machine has no accelerator. Use 'cpu' or 'disk' instead, "
                "or a device_map made on this machine."
            )
        return torch.device(kind, device)
    return torch.device(device)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module and, by default, its buffers."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def named_tensors_with_duplicates(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> list[tuple[str, Tensor]]:
    """Return the tensors of `named_module_tensors`, with tied tensors under each of their names."""
    tensors: list[tuple[str, Tensor]] = list(module.named_parameters(recurse=recurse, remove_duplicate=False))
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
        buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
        tensors += [(name, buffer) for name, buffer in buffers if name not in left_out]
    return tensors


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict omits; with `fqns`, their full names."""
    found: set[str] = set()
    for path, owner in module.named_modules(remove_duplicate=False) if recurse else [("", module)]:
        names = owner._non_persistent_buffers_set
        found |= {f"{path}.{name}" for name in names} if fqns and path else names
    return found


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Tell whether two devices are the same. An accelerator without an index is the current one of its type."""
    if first_device.type != second_device.type:
        return False
    if first_device == second_device or is_cpu(first_device) or first_device.type == "meta":
        return True

    def index(device: torch.device) -> int:
        return torch.accelerator.current_device_index() if device.index is None else device.index

    return index(first_device) == index(second_device)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of a module on a device, with a new value if one is given.

    A value is converted to the dtype of the tensor, or to `dtype`, which does not apply to integers. Tied parameters
    share one copy per device through `tied_params_map`. `fp16_statistics` are the row scales of an 8-bit weight of
    bitsandbytes.
    """
    owner, name = owner_of(module, tensor_name)
    tensors = tensors_with(owner, name)
    if name not in tensors:
        raise ValueError(f"{type(owner).__name__} has no parameter and no buffer {name!r} (in {tensor_name!r}).")
    target = as_device(device)
    old: Tensor | None = value if tensors[name] is None else tensors[name]
    if old is None or (value is None and dtype is None and check_device_same(old.device, target)):
        return
    _check_value(tensor_name, old, value, target)
    source = old if value is None else value
    copies = _tied_copies(source, tied_params_map)
    placed = copies.get(target)
    if placed is None or placed.shape != source.shape:
        placed = _copied(source, target, _dtype_for(old, value, dtype), non_blocking)
        if fp16_statistics is not None:
            placed.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
        if tensors is owner._parameters:
            placed = as_parameter(placed, like=old)
        if target != META:
            copies[target] = placed
    tensors[name] = placed
    if clear_cache and _leaves_accelerator(old.device, target):
        clear_device_cache()


def tensors_with(owner: nn.Module, name: str) -> dict[str, Any]:
    """Return the dictionary of a module that a tensor belongs to: its buffers, or else its parameters."""
    return owner._buffers if name in owner._buffers else owner._parameters


def _check_value(name: str, old: Tensor, value: Tensor | None, target: torch.device) -> None:
    """Raise if there is no value to place, or if it is not one for this tensor."""
    if value is None and old.is_meta and target != META:
        raise ValueError(f"{name} is on the meta device: a `value` is needed to put it on {target}.")
    if value is not None and old.shape != value.shape and not _is_packed(old):
        raise ValueError(
            f"Trying to set a tensor of shape {value.shape} in {name}, which has the shape {old.shape}: they "
            "are not of one model."
        )


def _tied_copies(source: Tensor, tied_params_map: TiedTensors | None) -> dict[Any, Tensor]:
    """Return the copies of a tied tensor by device; a tensor that is not tied has none."""
    return {} if tied_params_map is None or source.is_meta else tied_params_map.get(source.data_ptr(), {})


def _leaves_accelerator(device: torch.device, target: torch.device) -> bool:
    return device.type == accelerator_type() and target.type != device.type


def _dtype_for(old: Tensor, value: Tensor | None, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that a tensor takes with its new value; None keeps that of the value."""
    if dtype is None:
        return None if value is None or _is_packed(old) else old.dtype
    return proper_dtype(dtype) if value is None or value.is_floating_point() or value.is_complex() else None


def _copied(source: Tensor, target: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
    with torch.no_grad():
        return source.detach().to(target, dtype or source.dtype, non_blocking=non_blocking)


_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
"""Dtypes of tensors with a scale, which no name of a dtype tells."""


def proper_dtype(dtype: torch.dtype | str | None) -> Any:
    """Convert a name such as "torch.float16" to a dtype."""
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found in _QUANTIZED:
        raise InvalidDataError(f"{printable(dtype)!r} is not a dtype of plain numbers in this version of torch")
    return found


def _is_packed(tensor: Tensor) -> bool:
    """Tell whether a parameter is quantised, with a packed shape and dtype."""
    return type(tensor) not in (Tensor, nn.Parameter)


def as_parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    """Convert a tensor to a parameter of the class, and with the attributes, of another one."""
    kind: Any = type(like) if isinstance(like, nn.Parameter) else nn.Parameter
    requires_grad = like.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    if kind is nn.Parameter:
        parameter = nn.Parameter(tensor, requires_grad=requires_grad)
        for key, attribute in vars(like).items():
            setattr(parameter, key, attribute)
        return parameter
    # the classes of bitsandbytes take their attributes as arguments
    attributes = {key: attribute for key, attribute in vars(like).items() if key != "SCB"}
    made: nn.Parameter = kind(tensor, requires_grad=requires_grad, **attributes)
    return made


# --- Ties -------------------------------------------------------------------------------------------------------------


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names of each tied parameter, in the order of the model."""
    return tied_names(model.named_parameters(remove_duplicate=False))


def find_tied_tensors(model: nn.Module) -> list[list[str]]:
    """Return the groups of names of each tied parameter and each tied buffer."""
    return find_tied_parameters(model) + tied_names(model.named_buffers(remove_duplicate=False))


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie each group of names again, to the first parameter with values; other devices keep their own copy."""
    for group in tied_params:
        holders = [owner_of(model, name) for name in group]
        found = [getattr(owner, name, None) for owner, name in holders]
        source = next((tensor for tensor in found if isinstance(tensor, Tensor) and not tensor.is_meta), None)
        if source is None:
            source = next((tensor for tensor in found if isinstance(tensor, Tensor)), None)
        for (owner, name), tensor in zip(holders, found, strict=True):
            if source is not None and (tensor is None or tensor.is_meta or tensor.device == source.device):
                tensors_with(owner, name)[name] = source


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Tell whether the config of a transformers model ties weights."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ties_embeddings = getattr(text_config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings")
    has_output = bool(ties_embeddings) and model.get_output_embeddings() is not None  # type: ignore[operator]
    ties_encoder = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return has_output or bool(ties_encoder) or any(hasattr(module, "_tie_weights") for module in model.modules())
