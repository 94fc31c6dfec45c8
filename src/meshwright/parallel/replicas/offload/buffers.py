"""Memory for blocks outside of the device: of the host, or of a disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ....config.plugins.offload import OffloadConfig
from ....runtime.devices.device import has_streams, pinned
from ....runtime.streams.mapping import new_shared_file


class Buffers:
    """Make buffers of bytes where the configuration says."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        self.on_disk = config.placement == "disk"
        self._device = device
        self._folder = Path(tempfile.gettempdir() if config.folder is None else config.folder)
        if self.on_disk:
            self._folder.mkdir(parents=True, exist_ok=True)

    def keep(self, num_bytes: int) -> Tensor:
        """Return a buffer for what is kept while it is not used."""
        return new_shared_file(self._folder, num_bytes) if self.on_disk else self.transfer(num_bytes)

    def transfer(self, num_bytes: int) -> Tensor:
        """Return a buffer of the host that is copied to and from the device."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return pinned(buffer) if has_streams(self._device) else buffer


class BufferPool:
    """Buffers that are used again as soon as no tensor refers to them."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.buffers: list[Tensor] = []
        self._make = make
        self._unused: dict[int, int] = {}
        """By the number of each buffer, how many refer to its memory while nobody uses it."""

    def take(self, num_bytes: int) -> Tensor:
        """Return the smallest buffer that is large enough and free, or a new one."""
        free = [
            buffer
            for number, buffer in enumerate(self.buffers)
            if buffer.numel() >= num_bytes and _references(buffer) == self._unused[number]
        ]
        if free:
            return min(free, key=Tensor.numel)
        buffer = self._make(num_bytes)
        self._unused[len(self.buffers)] = _references(buffer)
        self.buffers.append(buffer)
        return buffer


def _references(buffer: Tensor) -> int:
    """Return how many tensors, arrays and others refer to the memory of a buffer."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
