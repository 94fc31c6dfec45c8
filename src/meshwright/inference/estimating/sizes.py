"""Count the bytes of a model's tensors in a number format, quantised ones too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...parallel.modules.wrapping import blocks_in_lists, units_of
from ..quantized import layers_to_convert, quantized_size
from ..tensors import get_non_persistent_buffers

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = (*FLOATS, "int8", "int4")


class Sizes:
    """The bytes of the tensors of a model in a format; tied tensors count once."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        if dtype not in FORMATS:
            raise ValueError(f"dtype={dtype!r} is unknown: choose one of {', '.join(FORMATS)}.")
        self._model = model
        self._dtype = dtype
        self._quantized: set[int] = set()
        self._unchanged: set[int] = set()
        if dtype not in FLOATS:
            self._quantized = {id(layer.weight) for layer in layers_to_convert(model).values()}
            computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
            self._unchanged = {id(buffer) for name, buffer in model.named_buffers() if name in computed}

    def total(self) -> int:
        """Return the bytes of all parameters and buffers."""
        return sum(map(self._bytes, (*self._model.parameters(), *self._model.buffers())))

    def largest_layer(self) -> tuple[str, int]:
        """Return the name and the bytes of the largest part that cannot be split."""
        return max(self._layers(), key=lambda layer: layer[1], default=("", 0))

    def _bytes(self, tensor: Tensor) -> int:
        if id(tensor) in self._quantized:
            return quantized_size(tensor, bits=int(self._dtype.removeprefix("int")))
        if not tensor.is_floating_point() or id(tensor) in self._unchanged:
            return tensor.numel() * tensor.element_size()
        return tensor.numel() * FLOATS.get(self._dtype, torch.float16).itemsize

    def _layers(self) -> Iterator[tuple[str, int]]:
        """Yield the parts that cannot be split, with their bytes: blocks, and modules outside of them."""
        blocks = {id(block) for block in blocks_of(self._model)}
        inside: set[int] = set()
        for name, module in self._model.named_modules():
            if id(module) in inside:
                continue
            whole = id(module) in blocks
            if whole:
                inside |= {id(part) for part in module.modules()}
            tensors = [*module.parameters(recurse=whole), *module.buffers(recurse=whole)]
            if tensors:
                yield name, sum(map(self._bytes, tensors))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: those that it names, or those in its module lists."""
    try:
        found = units_of(model, FullyShardedDataParallelPlugin(auto_wrap_policy=None))
    except ValueError:  # it names classes of which it has no modules
        found = blocks_in_lists(model)
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]
