"""What a test asks of the machine it runs on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime.collectives.operations import gather
from ..runtime.devices.device import default_device

torch_device: str = default_device().type
"""The kind of this machine's accelerator, or `cpu`."""
device_count: int = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
"""The number of its accelerators; 1 for a machine without."""


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of this machine's accelerator, their number, and a function that tells the memory in use."""
    allocated: Callable[[], int] = torch.accelerator.memory_allocated if torch_device != "cpu" else lambda: 0
    return torch_device, device_count, allocated


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Tell whether every process brought an equal tensor. All processes call it."""
    everyones = gather(tensor[None])
    return all(torch.equal(one, tensor) for one in everyones)
