"""Reading ahead: while a layer computes, a thread gets the weights of the next one.

The order is that of the modules at first, and after a forward pass the one that was seen. At any time there are the
weights of the layer that computes and of the one that comes next, no more. Layers computed on the CPU use mapped files
in place, see [Note: mapped memory]; for an accelerator the weights are read into pinned memory, from where they are
copied when it is their layer's turn, so that the device itself holds one layer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from ...checkpoint.formats.saving import storage_key
from ...runtime.devices.device import is_cpu, pinned
from .mapping import bring, let_go


class Layer:
    """The weights that one module brings to its device: where they are, and the dtype that it wants."""

    def __init__(self, weights: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]) -> None:
        self.weights = weights
        self.dtypes = dtypes

    def load(self, device: torch.device) -> dict[str, Tensor]:
        """Return the weights ready to use on the CPU, or ready to be copied to a device."""
        ready: dict[Any, Tensor] = {}  # what is tied within the layer comes once
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
                bring(stored)
            else:
                let_go(stored)
            return wanted
        if not is_cpu(wanted.device):
            return wanted
        ready = pinned(wanted.detach())
        if ready is not wanted:
            let_go(stored)
        return ready

    def let_go(self) -> None:
        """Give back the memory of weights that were used in place."""
        for name in self.dtypes:
            let_go(self.weights[name])


class WeightStream:
    """The layers of one model, in the order in which they are used."""

    _known: WeakValueDictionary[int, WeightStream] = WeakValueDictionary()

    def __init__(self, source: Any) -> None:
        self.source = source
        self._following: dict[Layer, Layer] = {}
        self._newest: Layer | None = None
        self._last: Layer | None = None
        self._ahead: tuple[Layer, torch.device, Future[dict[str, Tensor]]] | None = None
        self._lock = threading.Lock()
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @classmethod
    def of(cls, source: Any) -> WeightStream:
        """Return the stream of a collection of weights: one, whoever asks."""
        stream = cls._known.get(id(source))
        if stream is None or stream.source is not source:
            stream = cls._known[id(source)] = cls(source)
        return stream

    def add(self, layer: Layer) -> None:
        """Expect a layer after those that were added before."""
        if self._newest is not None:
            self._following[self._newest] = layer
        self._newest = layer

    def fetch(self, layer: Layer, device: torch.device) -> dict[str, Tensor]:
        """Return the weights of a layer, which now computes, and begin to read those of the next."""
        with self._lock:
            ahead, self._ahead = self._ahead if self._process == os.getpid() else None, None
            if self._last is not None and self._last is not layer:
                self._following[self._last] = layer
            self._last = layer
        if ahead is not None and ahead[0] is layer and ahead[1] == device:
            weights = ahead[2].result()
        else:
            if ahead is not None and not ahead[2].cancel() and ahead[2].exception() is None:
                ahead[0].let_go()
            weights = layer.load(device)
        self._read_ahead(self._following.get(layer), device)
        return weights

    def _read_ahead(self, layer: Layer | None, device: torch.device) -> None:
        if layer is None:
            return
        with self._lock:
            if self._ahead is None:
                if self._reader is None or self._process != os.getpid():  # a forked process has no threads
                    self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")
                    self._process = os.getpid()
                    finalize(self, self._reader.shutdown, wait=False)
                self._ahead = layer, device, self._reader.submit(layer.load, device)

    def __deepcopy__(self, memo: Any) -> WeightStream:
        return self  # a copy of a model reads the same weights

    def __reduce__(self) -> Any:
        return WeightStream.of, (self.source,)
