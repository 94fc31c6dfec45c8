"""A block that is kept on the host: its parameters in one buffer, and those on the device that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....config.plugins.sharding import FullyShardedDataParallelPlugin
from ....errors import UnsupportedSettingError
from ....runtime.devices.device import is_cpu
from ....runtime.streams.mapping import prefetch_pages, release_pages, return_freed_memory, write_pages
from ...modules.wrapping import units_of
from .buffers import Buffers

_ALIGNMENT = 64


class Span(NamedTuple):
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
        self.spans: list[Span] = []
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
        self.leaves: list[nn.Parameter] = []
        """The parameters on the device, which autograd sees."""
        self._gradients: Tensor | None = None
        self._state: dict[str, Tensor] = {}
        self.install(self.params)

    def _add_span(self, param: Tensor) -> None:
        dense = torch.empty_like(param, device="meta")  # the strides of a tensor without gaps
        self.spans.append(Span(self.num_bytes, param.nbytes, param.dtype, param.shape, dense.stride()))
        self.num_bytes += -(-param.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _on_host(self, param: nn.Parameter, span: Span) -> nn.Parameter:
        place = span.of(self.weights)
        with torch.no_grad():
            place.copy_(param)
        if is_cpu(param.device):
            param.data = place
            return param
        moved = nn.Parameter(place, requires_grad=param.requires_grad)
        self.replaced.append((param, moved))
        return moved

    def make_leaves(self, slot: Tensor) -> None:
        """Make the parameters on the device: views of the block's place there."""
        self.leaves = [
            nn.Parameter(span.of(slot).data, requires_grad=param.requires_grad)  # .data: with a version of its own
            for span, param in zip(self.spans, self.params, strict=True)
        ]

    def install(self, params: list[nn.Parameter]) -> None:
        """Let the module have these parameters: its own, or those on the device."""
        for owner, name, index in self._places:
            owner._parameters[name] = params[index]

    def install_leaves(self) -> None:
        """Let the module compute with the parameters on the device."""
        for owner, name, index in self._places:
            if owner._parameters[name] is not self.params[index]:
                raise RuntimeError(
                    f"The parameter {name} of {self.name} was replaced after prepare(), and offloaded blocks compute "
                    "with the one that was prepared. Change it in place: by copy_(), or load_state_dict() without "
                    "assign=True."
                )
            leaf = self.leaves[index]
            if leaf.requires_grad != self.params[index].requires_grad:
                leaf.requires_grad_(self.params[index].requires_grad)
            owner._parameters[name] = leaf

    def take_out(self) -> None:
        """Leave the module without parameters, so that moving the model does not move them."""
        for owner, name, _ in self._places:
            owner._parameters[name] = None

    def gradient(self, index: int) -> Tensor:
        """Return the place of a gradient on the host."""
        if self._gradients is None:
            self._gradients = self.buffers.keep(self.num_bytes)
        return self.spans[index].of(self._gradients)

    # --- on a disk --------------------------------------------------------------------------------------------------

    def keep_state(self, state: Mapping[Any, Any]) -> None:
        """Move an optimizer's state of the parameters to where the parameters are kept."""
        has_moved = False
        for param, span in zip(self.params, self.spans, strict=True):
            moments = state.get(param, {})
            for name, value in moments.items():
                if isinstance(value, Tensor) and (value.dtype, value.shape) == (span.dtype, span.size):
                    if name not in self._state:
                        self._state[name] = self.buffers.keep(self.num_bytes)
                    kept = span.of(self._state[name])
                    if kept.data_ptr() != value.data_ptr():
                        moments[name] = kept.copy_(value)
                        has_moved = True
        if has_moved:
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
        return [self.weights, *self._state.values(), *([] if self._gradients is None else [self._gradients])]


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
