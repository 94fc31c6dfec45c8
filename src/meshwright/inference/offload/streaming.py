"""Prefetch weights: while a layer computes, a thread loads the weights of the next one.

The order is that of the modules at first, and then that of the last forward pass. At any time there are the weights of
the layer that computes and of the next one, no more. Layers on the CPU use mapped files in place, see [Note: mapped
memory]. For an accelerator the weights are read into pinned memory and, where the device has room for two more layers,
copied on a stream of their own; else they are copied when their layer is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...checkpoint.formats.saving import storage_key
from ...runtime.devices.device import allocatable_memory, has_streams, is_cpu, pinned, side_stream
from ...runtime.streams.mapping import prefetch_pages, release_pages
from ...runtime.streams.read_ahead import ReadAhead


class Layer:
    """The offloaded weights of one module, and the dtypes to load them in."""

    def __init__(self, weights: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]) -> None:
        self.weights = weights
        self.dtypes = dtypes

    def load(self, device: torch.device) -> dict[str, Tensor]:
        """Return the weights, ready for use on the CPU or for a copy to the device."""
        ready: dict[Any, Tensor] = {}  # tied weights within the layer are loaded once
        weights: dict[str, Tensor] = {}
        for name, dtype in self.dtypes.items():
            stored: Tensor = self.weights[name]
            key = storage_key(stored) if stored.numel() else name
            if key not in ready:
                ready[key] = self._ready(stored, dtype, device)
            weights[name] = ready[key]
        return weights

    def _ready(self, stored: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        wanted = stored if dtype is None or dtype == stored.dtype else stored.detach().to(dtype)
        if is_cpu(device):
            if wanted is stored:
                prefetch_pages(stored)
            else:
                release_pages(stored)
            return wanted
        if not is_cpu(wanted.device):
            return wanted
        ready = pinned(wanted.detach())
        if ready is not wanted:
            release_pages(stored)
        return ready

    def release(self) -> None:
        """Release the pages of weights that were used in place."""
        for name in self.dtypes:
            release_pages(self.weights[name])


class LoadedLayer(NamedTuple):
    """The weights of a layer that were loaded ahead."""

    weights: dict[str, Tensor]
    device: torch.device
    copied: torch.Event | None = None
    """When the weights are on the device, if they are being copied there."""

    def ready(self) -> dict[str, Tensor]:
        """Return the weights; what the current stream does from now on waits for them."""
        if self.copied is not None:
            computing = torch.accelerator.current_stream(self.device)
            computing.wait_event(self.copied)
            for weight in self.weights.values():
                weight.record_stream(computing)  # their memory is of the stream that copied
        return self.weights


def _num_bytes_on_host(weights: Mapping[str, Tensor]) -> int:
    return sum(
        weight.nbytes
        for weight in {id(weight): weight for weight in weights.values()}.values()
        if is_cpu(weight.device)
    )


class WeightStream:
    """The layers of one model in the order of their use, with prefetch of the next one."""

    _streams: WeakValueDictionary[int, WeightStream] = WeakValueDictionary()

    def __init__(self, source: Any) -> None:
        self.source = source
        self._ahead: ReadAhead[Layer, LoadedLayer] = ReadAhead(discard=Layer.release)
        self._largest = 0

    @classmethod
    def of(cls, source: Any) -> WeightStream:
        """Return the stream of a collection of weights; there is one per collection."""
        stream = cls._streams.get(id(source))
        if stream is None or stream.source is not source:
            stream = cls._streams[id(source)] = cls(source)
        return stream

    def add(self, layer: Layer) -> None:
        """Append a layer to the expected order."""
        self._ahead.add(layer)

    def fetch(self, layer: Layer, device: torch.device) -> dict[str, Tensor]:
        """Return the weights of a layer, and start to prefetch those of the next one."""
        loaded = self._ahead.take(layer)
        if loaded is not None and loaded.device != device:
            layer.release()
            loaded = None
        weights = layer.load(device) if loaded is None else loaded.ready()
        following = self._ahead.next_of(layer)
        if following is not None:
            self._prefetch(following, device, _num_bytes_on_host(weights))
        return weights

    def _prefetch(self, layer: Layer, device: torch.device, still_to_place: int) -> None:
        # Asked here, where no other thread allocates: while the reader asks, this thread places the present layer.
        room = allocatable_memory(device) - still_to_place if has_streams(device) else 0
        self._ahead.start(layer, lambda: self._load_ahead(layer, device, room), device)

    def _load_ahead(self, layer: Layer, device: torch.device, room: int) -> LoadedLayer:
        weights = layer.load(device)
        on_host = {id(weight): weight for weight in weights.values() if is_cpu(weight.device)}
        self._largest = max(self._largest, _num_bytes_on_host(weights))
        if not on_host or room < 2 * self._largest:  # one for the layer, and one for what the layer before it computes
            return LoadedLayer(weights, device)
        copying = side_stream(device)
        with copying:
            copies = {each: weight.detach().to(device, non_blocking=True) for each, weight in on_host.items()}
        copied = copying.record_event()
        return LoadedLayer({name: copies.get(id(weight), weight) for name, weight in weights.items()}, device, copied)

    def __deepcopy__(self, memo: Any) -> WeightStream:
        return self  # a copy of a model reads the same weights

    def __reduce__(self) -> Any:
        return WeightStream.of, (self.source,)
