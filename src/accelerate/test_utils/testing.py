"""What a test asks of the machine it runs on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.collectives.operations import gather
from ..runtime.devices.device import default_device

torch_device: str = default_device().type
"""The kind of this machine's accelerator, or `cpu`."""
device_count: int = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
"""The number of its accelerators; 1 for a machine without."""


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Tell whether every process brought an equal tensor. All processes call it."""
    everyones = gather(tensor[None])
    return all(torch.equal(one, tensor) for one in everyones)
