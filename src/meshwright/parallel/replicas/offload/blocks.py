"""A block that is kept on the host: its parameters in one buffer, and what stands for them on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....config.plugins.sharding import FullyShardedDataParallelPlugin
from ....errors import UnsupportedSettingError
from ....runtime.devices.device import is_cpu
from ....runtime.streams.mapping import prefetch_pages, release_pages, return_freed_memory, write_pages
from ...modules.gradient_hooks import carry_hooks
from ...modules.wrapping import units_of
from .buffers import BufferPool, Buffers

_ALIGNMENT = 64

Sources = tuple[Tensor, ...]
"""Where the values of a block's parameters are on the host."""


class BufferSpan(NamedTuple):
    """Where a tensor is in a buffer of bytes."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of a buffer."""
        numbers = buffer[self.start : self.start + self.num_bytes].view(self.dtype)
        return numbers.as_strided(self.size, self.stride)


class Block:
    """One repeated block of a model."""

    def __init__(self, name: str, module: nn.Module, index: int, buffers: Buffers) -> None:
        self.name, self.module, self.index = name, module, index
        self.slot = index % 2
        """Which of the two places on the device it has, in every pass: autograd keeps views of it."""
        self.buffers = buffers
        self.spans: list[BufferSpan] = []
        self.num_bytes = 0
        self._places: list[tuple[nn.Module, str, int]] = []
        originals: dict[int, tuple[int, nn.Parameter]] = {}
        for path, owner in module.named_modules():
            for own_name, param in owner._parameters.items():
                if param is not None:
                    index_of_param, _ = originals.setdefault(id(param), (len(originals), param))
                    if index_of_param == len(self.spans):
                        _check(param, f"{name}.{path}.{own_name}" if path else f"{name}.{own_name}")
                        self._add_span(param)
                    self._places.append((owner, own_name, index_of_param))
        self.weights = buffers.keep(self.num_bytes)
        self.replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Parameters that came on a device, and those on the host that replace them."""
        self.params = [
            self._on_host(param, span) for (_, param), span in zip(originals.values(), self.spans, strict=True)
        ]
        self.on_device: list[nn.Parameter] = []
        """Views of the block's place on the device."""
        self.gradients = BufferPool(buffers.keep)
        """Where gradients are, if blocks are on a disk."""
        self._state: dict[tuple[str, int], Tensor] = {}
        self._state_buffers: list[Tensor] = []
        self._kept = self._sources = tuple(param.data for param in self.params)
        self.install(self.params)

    def _add_span(self, param: Tensor) -> None:
        dense = torch.empty_like(param, device="meta")  # the strides of a tensor without gaps
        self.spans.append(BufferSpan(self.num_bytes, param.nbytes, param.dtype, param.shape, dense.stride()))
        self.num_bytes += _aligned(param.nbytes)

    def _on_host(self, param: nn.Parameter, span: BufferSpan) -> nn.Parameter:
        place = span.of(self.weights)
        with torch.no_grad():
            place.copy_(param)
        if is_cpu(param.device):
            param.data = place
            return param
        moved = nn.Parameter(place, requires_grad=param.requires_grad)
        moved.__dict__.update(param.__dict__)
        carry_hooks(param, moved)
        self.replaced.append((param, moved))
        return moved

    def place(self, slot: Tensor) -> None:
        """Have a place on the device."""
        # .data: with versions of their own
        self.on_device = [nn.Parameter(span.of(slot).data, requires_grad=False) for span in self.spans]

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Let the module have these parameters: its own, or what stands for them on the device."""
        for owner, name, index in self._places:
            owner._parameters[name] = tensors[index]  # type: ignore[assignment]

    def check(self) -> None:
        """Refuse to compute with parameters that replace those that are kept here."""
        for owner, name, index in self._places:
            if owner._parameters[name] is not self.params[index]:
                raise RuntimeError(
                    f"The parameter {name} of {self.name} was replaced after prepare(), and offloaded blocks compute "
                    "with the one that was prepared. Change it in place: by copy_(), or load_state_dict() without "
                    "assign=True."
                )

    def sources(self) -> Sources:
        """Return where the values of the parameters are: here, unless the script did `param.data = ...`."""
        for param, source in zip(self.params, self._sources, strict=True):
            if (param.data_ptr(), param.shape, param.stride()) != (source.data_ptr(), source.shape, source.stride()):
                self._sources = self._moved()
                break
        return self._sources

    def _moved(self) -> Sources:
        for param, span in zip(self.params, self.spans, strict=True):
            if (param.shape, param.dtype) != (span.size, span.dtype):
                raise RuntimeError(
                    f"A parameter of {self.name}, which is offloaded, was given other data: {param.dtype} of shape "
                    f"{tuple(param.shape)} instead of {span.dtype} of shape {tuple(span.size)}. Change it before "
                    "prepare()."
                )
        kept = all(
            (param.data_ptr(), param.stride()) == (span.of(self.weights).data_ptr(), span.stride)
            for param, span in zip(self.params, self.spans, strict=True)
        )
        return self._kept if kept else tuple(param.data for param in self.params)

    def copy_to(self, slot: Tensor, sources: Sources, *, non_blocking: bool = False) -> None:
        """Copy the values of the parameters to a place on the device."""
        if sources is self._kept:
            slot[: self.num_bytes].copy_(self.weights, non_blocking=non_blocking)
        else:
            for source, span in zip(sources, self.spans, strict=True):
                span.of(slot).copy_(source)

    def take_out(self) -> None:
        """Leave the module without parameters, so that moving the model does not move them."""
        for owner, name, _ in self._places:
            owner._parameters[name] = None

    def spans_of(self, indices: Iterable[int]) -> tuple[list[BufferSpan], int]:
        """Return where some of the parameters' gradients or moments are in a buffer of their own, and its size."""
        spans, num_bytes = [], 0
        for index in indices:
            spans.append(self.spans[index]._replace(start=num_bytes))
            num_bytes += _aligned(self.spans[index].num_bytes)
        return spans, num_bytes

    def places(self, indices: Sequence[int], pool: BufferPool) -> dict[int, Tensor]:
        """Return memory of a pool for the gradients of some of the parameters."""
        if not indices:
            return {}
        spans, num_bytes = self.spans_of(indices)
        buffer = pool.take(num_bytes)
        # .data: with versions of their own
        return {index: span.of(buffer).data for index, span in zip(indices, spans, strict=True)}

    # --- on a disk --------------------------------------------------------------------------------------------------

    def keep_state(self, state: Mapping[Any, Any]) -> None:
        """Move an optimizer's state of the parameters to where the parameters are kept."""
        moved: dict[str, list[int]] = {}
        for index, (param, span) in enumerate(zip(self.params, self.spans, strict=True)):
            for name, value in state.get(param, {}).items():
                if isinstance(value, Tensor) and (value.dtype, value.shape) == (span.dtype, span.size):
                    kept = self._state.get((name, index))
                    if kept is None or kept.data_ptr() != value.data_ptr():
                        moved.setdefault(name, []).append(index)
        for name, indices in moved.items():
            spans, num_bytes = self.spans_of(index for index in indices if (name, index) not in self._state)
            if spans:
                self._state_buffers.append(self.buffers.keep(num_bytes))
            for index in indices:
                if (name, index) not in self._state:
                    self._state[name, index] = spans.pop(0).of(self._state_buffers[-1])
                moments = state[self.params[index]]
                moments[name] = self._state[name, index].copy_(moments[name])
        if moved:
            return_freed_memory()

    def prefetch(self) -> None:
        """Read everything from the disk, if it is there."""
        for buffer in self._buffers():
            prefetch_pages(buffer)

    def release(self) -> None:
        """Free the host's memory of what is on the disk."""
        for buffer in self._buffers():
            write_pages(buffer)
            release_pages(buffer)

    def _buffers(self) -> list[Tensor]:
        return [self.weights, *self._state_buffers, *self.gradients.buffers]


def blocks_of(
    model: nn.Module, classes: Iterable[str] | None, buffers: Buffers, *, required: bool = True
) -> list[Block]:
    """Return the outermost repeated blocks of a model, in its order, with their parameters on the host."""
    modules = _repeated(model, classes)
    if len(modules) < 2:
        if not required:
            return []
        raise UnsupportedSettingError(
            f"offload with {type(model).__name__}",
            "it has no repeated blocks: modules of one class, with modules inside, in a ModuleList or a Sequential.",
            "Name their class: OffloadConfig(block_classes=[...]).",
        )
    blocks = []
    for index, (name, module) in enumerate(modules):
        blocks.append(Block(name, module, index, buffers))
        blocks[-1].release()
    return blocks


def _repeated(model: nn.Module, classes: Iterable[str] | None) -> list[tuple[str, nn.Module]]:
    names = None if classes is None else list(classes)
    units = units_of(model, FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=names))
    inner = {id(module) for unit in units for module in unit.modules() if module is not unit}
    chosen = {id(unit) for unit in units if id(unit) not in inner and next(unit.parameters(), None) is not None}
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen]


def _check(param: Tensor, name: str) -> None:
    if param.is_meta:
        raise UnsupportedSettingError(
            f"offload with {name} on the meta device", "it has no values.", "Load the weights before prepare()."
        )
    if type(param) is not nn.Parameter or param.layout != torch.strided:
        raise UnsupportedSettingError(
            f"offload with {name}, a {type(param).__name__}",
            "only plain parameters are copied as they are.",
            "Leave offload out, or load the model without quantisation or sharding.",
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
