"""Staging buffers for a save in the background: one set in host memory, reused for every save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import dtensor_like, local
from ...runtime.collectives.nested import leaves
from ..formats.codec import THREADS
from ..formats.saving import storage_key


class Staging:
    """Copies of tensors that training does not modify. They hold one checkpoint, so at most one save is pending."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}

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
            key = storage_key(tensor)
            if tensor.numel() and key in copies:  # tied weights stay tied
                return copies[key]
            source = local(tensor.detach())
            buffer = old[len(new)] if len(new) < len(old) else None
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype)
            new.append(buffer)
            sources.append(source)
            copies[key] = dtensor_like(tensor, buffer)
            return copies[key]

        copies_of = {id(leaf): copied(leaf) for leaf in leaves(state) if isinstance(leaf, Tensor)}
        staged = deepcopy(state, copies_of)  # arrays and lists are modified by training too
        with ThreadPoolExecutor(THREADS) as pool:  # one thread does not saturate the memory bandwidth
            list(pool.map(Tensor.copy_, new, sources))
        self._buffers[name] = new
        return staged

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()
