"""Copies for a save in the background: in the host's memory, one set, used again for every save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...parallel.modules.dtensors import dtensor_like, local
from ...runtime.collectives.nested import leaves
from ..formats.codec import THREADS
from ..formats.saving import memory_of


class Staging:
    """Memory that training does not touch. It holds one checkpoint, so at most one save is on its way."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Return how much memory is held."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def copy(self, name: str, state: Any) -> Any:
        """Copy the tensors of a state; memory that is used again need not be asked for, which is most of the time."""
        old: list[Tensor] = self._buffers.get(name, [])
        new: list[Tensor] = []
        sources: list[Tensor] = []
        copies: dict[tuple[Any, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            place = memory_of(tensor)
            if tensor.numel() and place in copies:  # tied weights stay tied
                return copies[place]
            source = local(tensor.detach())
            buffer = old[len(new)] if len(new) < len(old) else None
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype)
            new.append(buffer)
            sources.append(source)
            copies[place] = dtensor_like(tensor, buffer)
            return copies[place]

        copies_of = {id(leaf): copied(leaf) for leaf in leaves(state) if isinstance(leaf, Tensor)}
        staged = deepcopy(state, copies_of)  # arrays and lists go on changing too
        with ThreadPoolExecutor(THREADS) as pool:  # one thread does not use up the memory's speed
            list(pool.map(Tensor.copy_, new, sources))
        self._buffers[name] = new
        return staged

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
