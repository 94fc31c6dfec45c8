"""Build models without memory: parameters are moved to a device as they are registered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .tensors import META, Device, as_device, as_parameter


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models inside the block without memory for their parameters, on the meta device.

    Buffers stay real unless `include_buffers` is set, because a checkpoint may not bring their values back.
    """
    with init_on_device(META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models inside the block on a device; with `include_buffers`, all tensors are created there."""
    target = as_device(device)
    if include_buffers:
        with target:
            yield
        return
    register = nn.Module.register_parameter

    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        placed = module._parameters[name]
        if placed is not None and placed.device != target:  # a tied one is there already
            module._parameters[name] = as_parameter(placed.detach().to(target), like=placed)

    nn.Module.register_parameter = register_on_device  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
