"""Keep what a model saves for its backward pass on the host, and bring it back where it is needed.

[Note: copies of activations]
A tensor is copied to pinned memory on a stream of its own, after what the computing stream has been given so far; its
memory on the device is free once that copy is made, which is recorded with the allocator. The backward pass copies it
back on the computing stream. Several operators may save one tensor (the output of a norm): it is copied once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....errors import UnsupportedSettingError
from ....runtime.devices.device import has_streams, pinned_empty


def offload_activations(model: nn.Module, *, min_bytes: int = 1 << 20) -> nn.Module:
    """Keep the activations of a model on the host between forward and backward pass; return the model.

    Call it before `prepare`. Results are bitwise equal. On a CPU it changes nothing: everything is on the host.

    Args:
        model: A model, or a part of one.
        min_bytes: The size from which on a tensor is moved. Parameters and buffers stay.
    """
    refuse_offloaded(model, "a second call")
    model.forward = OffloadedForward(model.forward, min_bytes)
    return model


def refuse_offloaded(model: nn.Module, setting: str) -> None:
    """Refuse a setting that does not go with offloaded activations."""
    if any(isinstance(part.forward, OffloadedForward) for part in model.modules()):
        raise UnsupportedSettingError(
            f"offload_activations with {setting}",
            "the activations of an eager forward pass are offloaded, and once.",
            "Leave one out.",
        )


class OffloadedForward:
    """A forward pass whose large saved tensors are on the host until the backward pass."""

    def __init__(self, forward: Callable[..., Any], min_bytes: int) -> None:
        self.forward = forward
        self.min_bytes = min_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        copies = _Copies(self.min_bytes)
        with saved_tensors_hooks(copies.pack, _unpack):
            return self.forward(*args, **kwargs)


class _Kept:
    """A tensor on the host that was on a device."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        leaving = _leaving_stream(tensor.device)
        leaving.wait_stream(torch.accelerator.current_stream(tensor.device))
        self.host = pinned_empty(tensor)
        with leaving:
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(leaving)
        self.copied = leaving.record_event()

    def back(self) -> Tensor:
        """Return the tensor on its device."""
        torch.accelerator.current_stream(self.device).wait_event(self.copied)
        return self.host.to(self.device, non_blocking=True)


class _Copies:
    """The copies that one forward pass has made."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self._sources: dict[Any, Any] = {}
        self._kept: WeakValueDictionary[Any, _Kept] = WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Return a tensor's copy on the host, or the tensor, without its history: it may be what saves it."""
        own = tensor.detach()
        if not self._moves(tensor):
            return own
        storage = own.untyped_storage()
        key = (storage._cdata, own._version, own.storage_offset(), own.shape, own.stride(), own.dtype)
        source = self._sources.get(key)
        kept = self._kept.get(key) if source is not None and source() is storage else None
        if kept is None:
            kept = _Kept(own)
            self._sources[key], self._kept[key] = ref(storage), kept
        return kept

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # not of another class, and no parameter
            and has_streams(tensor.device)
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.nbytes >= self.min_bytes
            and tensor.untyped_storage().nbytes() >= tensor.nbytes  # not expanded
        )


def _unpack(saved: Tensor | _Kept) -> Tensor:
    return saved.back() if isinstance(saved, _Kept) else saved


@cache
def _leaving_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
