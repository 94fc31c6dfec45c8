"""Staging buffers for a save in the background: one set in host memory, reused for every save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import dtensor_like, local
from ...precision.quantized import is_composed, with_parts
from ...runtime.collectives.nested import leaves
from ...runtime.devices import device as devices
from ...runtime.streams.mapping import THREADS
from ..formats.saving import storage_key


class Staging:
    """Copies of tensors that training does not modify. They hold one checkpoint, so at most one save is pending.

    Tensors of a device are copied to pinned memory on a stream of its own. The copies begin after what training has
    enqueued so far, and what it enqueues later waits for them on the device. The host waits in `synchronize()` only.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of the buffers."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def copy(self, name: str, state: Any) -> Any:
        """Copy the tensors of a state to the buffers. Reusing buffers avoids allocation, most of the cost of a copy."""
        old: list[Tensor] = self._buffers.get(name, [])
        new: list[Tensor] = []
        sources: list[Tensor] = []
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if is_composed(own := local(tensor.detach())):  # without an address of its own
                return dtensor_like(tensor, with_parts(own, copied))  # noqa: F821 - deleted after its last call
            key = storage_key(tensor)
            if tensor.numel() and key in copies:  # tied weights stay tied
                return copies[key]
            source = local(tensor.detach())
            buffer = old[len(new)] if len(new) < len(old) else None
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = _buffer_for(source)
            new.append(buffer)
            sources.append(source)
            copies[key] = dtensor_like(tensor, buffer)
            return copies[key]

        copies_of = {id(leaf): copied(leaf) for leaf in leaves(state) if isinstance(leaf, Tensor)}
        del copied  # it refers to itself, and would keep the buffers until garbage is collected
        staged = deepcopy(state, copies_of)  # arrays and lists are modified by training too
        late = [(buffer, source) for buffer, source in zip(new, sources, strict=True) if buffer.is_pinned()]
        now = [(buffer, source) for buffer, source in zip(new, sources, strict=True) if not buffer.is_pinned()]
        for device in {source.device for _, source in late}:
            self._copy_from(device, [pair for pair in late if pair[1].device == device])
        with ThreadPoolExecutor(THREADS) as pool:  # one thread does not saturate the memory bandwidth
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), now))
        self._buffers[name] = new
        return staged

    def _copy_from(self, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Enqueue copies of a device's tensors to the host."""
        training = torch.accelerator.current_stream(device)
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(training)
        with stream:
            for buffer, source in pairs:
                buffer.copy_(source, non_blocking=True)
        copied = stream.record_event()
        training.wait_event(copied)  # the next step modifies the tensors
        self._copied.append(copied)

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        while self._copied:
            self._copied.pop().synchronize()

    def clear(self) -> None:
        """Free the buffers, and give their memory back."""
        self._buffers.clear()
        devices.release_pinned_memory()


def _buffer_for(source: Tensor) -> Tensor:
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    return devices.pinned_empty(like) if devices.has_streams(source.device) else torch.empty_like(like, device="cpu")
