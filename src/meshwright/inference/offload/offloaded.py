"""Access to offloaded weights: load them temporarily, or collect them in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.streams.mapping import is_mapped
from ..tensors import Device, named_module_tensors, set_module_tensor_to_device
from .hooks import AlignDevicesHook, SequentialHook


def _align_hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = getattr(module, "_hf_hook", None)
    for one in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
        if isinstance(one, AlignDevicesHook) and one.offload:
            return one
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Tell whether the direct weights of a module are offloaded."""
    return _align_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Load the direct weights of a module to a device inside the block; changes to offloaded ones are kept."""
    hook = _align_hook(module)
    if hook is not None:
        before = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        hook.pre_forward(module)
        try:
            yield
            _write_back(hook, module)
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
    elif execution_device is not None:
        devices = {name: tensor.device for name, tensor in named_module_tensors(module)}
        for name in devices:
            set_module_tensor_to_device(module, name, execution_device)
        try:
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)
    else:
        yield


def _write_back(hook: AlignDevicesHook, module: nn.Module) -> None:
    """Write changed weights back to the weights map of the hook; files are not changed."""
    for name, tensor in named_module_tensors(module, hook.offload_buffers, hook.place_submodules, True):
        stored: Any = hook.weights_map.get(name) if hook.weights_map is not None else None
        if not isinstance(stored, Tensor) or is_mapped(stored) or tensor.is_meta:
            continue
        if stored.data_ptr() != tensor.data_ptr() and stored.shape == tensor.shape:
            with torch.no_grad():
                stored.detach().copy_(tensor.detach())


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict of the whole model on the CPU, including offloaded weights."""
    state: dict[str, Tensor] = {}
    skipped = set(get_skipped(model))
    for path, module in model.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        hook = _align_hook(module)
        for name, tensor in named_module_tensors(module, remove_non_persistent=True):
            if dot + name in skipped:
                continue
            state[dot + name] = tensor.detach()
        if hook is not None and hook.weights_map is not None:
            for name, tensor in named_module_tensors(module, True, hook.place_submodules, True):
                if tensor.is_meta:
                    stored = hook.weights_map[name]
                    state[dot + name] = stored.detach() if tensor.dtype == stored.dtype else stored.to(tensor.dtype)
    order = [name for name in model.state_dict() if name in state]
    return {name: state[name].cpu() if not state[name].is_meta else state[name] for name in order}


def offloaded_tensors(model: nn.Module) -> Callable[[str], Tensor]:
    """Return a function from the name of an offloaded weight to its value, which is read when it is used."""

    def value(name: str) -> Tensor:
        path, _, own = name.rpartition(".")
        while True:
            hook = _align_hook(model.get_submodule(path))
            if hook is not None and hook.weights_map is not None and own in hook.weights_map:
                stored: Tensor = hook.weights_map[own]
                return stored.detach()
            if not path:
                raise ValueError(f"{name} is on the meta device and has no value: load the weights first.")
            path, _, last = path.rpartition(".")
            own = f"{last}.{own}"  # a hook may place the submodules of its module, too

    return value


def get_skipped(model: nn.Module) -> list[str]:
    """Return the names that a model excludes from its state dict."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Device = "cpu",
) -> dict[str, Any]:
    """Replace the entries of an offloaded module in a state dict by their values."""
    root = module_name.rpartition(".")[0]
    dot = f"{root}." if root else ""
    if not has_offloaded_params(module):
        return state_dict
    with align_module_device(module, device_to_put_offload):
        for key, value in module.state_dict().items():
            if dot + key in state_dict:
                state_dict[dot + key] = value
    return state_dict
