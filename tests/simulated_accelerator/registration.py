"""Make a process one that has the device."""

from __future__ import annotations

import atexit
import functools
import os

import torch

from .build import extension
from .collectives import register_collectives
from .device_module import NAME, NO_LIMIT, device_module
from .faults import reset_faults
from .rules import vendor

DEVICES_VARIABLE = "SIMULATED_ACCELERATOR_DEVICES"
"""How many devices there are: 2 to 8."""
NO_FLOAT64_VARIABLE = "SIMULATED_ACCELERATOR_NO_FLOAT64"
"""Set to 1, the device refuses float64."""


@functools.cache
def register() -> None:
    """Make this process one that has the device."""
    extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    setattr(torch._C, f"_{NAME}_hasPrimaryContext", extension().has_context)  # as `_cuda_hasPrimaryContext`
    register_collectives()
    atexit.register(_finish)
    reset()


def reset(devices: int = 2) -> None:
    """Be as new: the first of the devices is current, generators have their default seeds, memory has no limit."""
    extension().set_device_count(int(os.environ.get(DEVICES_VARIABLE, devices)))
    extension().set_device(0)
    reset_faults()
    if os.environ.get(NO_FLOAT64_VARIABLE) == "1":
        extension().refuse_float64(True)
    device_module.calls.clear()
    device_module.manual_seed_all(torch.Generator().initial_seed())
    for index in range(device_module.device_count()):
        extension().set_memory_limit(index, NO_LIMIT)


def _finish() -> None:
    """Let the devices finish: their threads must not run while the interpreter is taken down."""
    if not device_module._is_in_bad_fork():
        if extension().failures_are_silent() or vendor():
            extension().interrupt_collectives()  # nothing else would end them
        for index in device_module.contexts():
            extension().synchronize(index)
