"""Prefetch weights: while a layer computes, a thread loads the weights of the next one.

The order is that of the modules at first, and then that of the last forward pass. At any time there are the weights of
the layer that computes and of the next one, no more. Layers on the CPU use mapped files in place, see [Note: mapped
memory]. For an accelerator the weights are read into pinned memory and, where the device has room for two more layers,
copied on a stream of their own; else they are copied when their layer is called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from ...checkpoint.formats.mapping import prefetch_pages, release_pages
from ...checkpoint.formats.saving import storage_key
from ...runtime.devices.device import activate, allocatable_memory, has_streams, is_cpu, pinned


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


class Loaded(NamedTuple):
    """The weights of a layer that were loaded ahead."""

    weights: dict[str, Tensor]
    copied: torch.Event | None = None
    """When the weights are on the device, if they are being copied there."""

    def ready_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the weights; what the current stream does from now on waits for them."""
        if self.copied is not None:
            computing = torch.accelerator.current_stream(device)
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
        self._next_layers: dict[Layer, Layer] = {}
        self._last_added: Layer | None = None
        self._last_used: Layer | None = None
        self._prefetched: tuple[Layer, torch.device, Future[Loaded]] | None = None
        self._copying: torch.Stream | None = None
        self._largest = 0
        self._lock = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @classmethod
    def of(cls, source: Any) -> WeightStream:
        """Return the stream of a collection of weights; there is one per collection."""
        stream = cls._streams.get(id(source))
        if stream is None or stream.source is not source:
            stream = cls._streams[id(source)] = cls(source)
        return stream

    def add(self, layer: Layer) -> None:
        """Append a layer to the expected order."""
        if self._last_added is not None:
            self._next_layers[self._last_added] = layer
        self._last_added = layer

    def fetch(self, layer: Layer, device: torch.device) -> dict[str, Tensor]:
        """Return the weights of a layer, and start to prefetch those of the next one."""
        with self._lock:
            prefetched, self._prefetched = self._prefetched if self._process == os.getpid() else None, None
            if self._last_used is not None and self._last_used is not layer:
                self._next_layers[self._last_used] = layer
            self._last_used = layer
        if prefetched is not None and prefetched[0] is layer and prefetched[1] == device:
            weights = prefetched[2].result().ready_on(device)
        else:
            if prefetched is not None and not prefetched[2].cancel() and prefetched[2].exception() is None:
                prefetched[0].release()
            weights = layer.load(device)
        self._prefetch(self._next_layers.get(layer), device, _num_bytes_on_host(weights))
        return weights

    def _prefetch(self, layer: Layer | None, device: torch.device, still_to_place: int) -> None:
        if layer is None:
            return
        # Asked here, where no other thread allocates: while the reader asks, this thread places the present layer.
        room = allocatable_memory(device) - still_to_place if has_streams(device) else 0
        with self._lock:
            if self._prefetched is None:
                if self._reader is None or self._process != os.getpid():  # a forked process has no threads
                    self._reader = ThreadPoolExecutor(
                        1, thread_name_prefix="weights", initializer=activate, initargs=(device,)
                    )
                    self._process = os.getpid()
                    finalize(self, self._reader.shutdown, wait=False)
                self._prefetched = layer, device, self._reader.submit(self._load_ahead, layer, device, room)

    def _load_ahead(self, layer: Layer, device: torch.device, room: int) -> Loaded:
        weights = layer.load(device)
        on_host = {id(weight): weight for weight in weights.values() if is_cpu(weight.device)}
        self._largest = max(self._largest, _num_bytes_on_host(weights))
        if not on_host or room < 2 * self._largest:  # one for the layer, and one for what the layer before it computes
            return Loaded(weights)
        if self._copying is None or self._copying.device != device:
            self._copying = torch.Stream(device)
        with self._copying:
            copies = {each: weight.detach().to(device, non_blocking=True) for each, weight in on_host.items()}
        copied = self._copying.record_event()
        return Loaded({name: copies.get(id(weight), weight) for name, weight in weights.items()}, copied)

    def __deepcopy__(self, memo: Any) -> WeightStream:
        return self  # a copy of a model reads the same weights

    def __reduce__(self) -> Any:
        return WeightStream.of, (self.source,)
