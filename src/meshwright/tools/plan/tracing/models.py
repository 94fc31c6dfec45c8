"""Convert models of fake tensors, and shorten them: a few of their repeated blocks show what the others do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COUNTED_AS_NAMES = ("idx", "index", "number", "_id")


class Truncation:
    """Shorten lists of equal blocks, and forget the parameters of the others."""

    def __init__(self, blocks: tuple[int, int] | None) -> None:
        self._wanted = blocks
        self.kept = 0
        self.found = 0
        self._dropped: dict[int, Tensor] = {}

    def apply(self, model: nn.Module, stages: int = 1) -> None:
        """Shorten the model's longest list of equal blocks; each stage of a pipeline keeps as many."""
        longest = max(_block_lists(model), key=len, default=None)
        if longest is None:
            return
        self.found = max(self.found, len(longest))
        period = _period([_signature(block) for block in longest.children()])
        wanted = len(longest)
        if self._wanted is not None:
            model_blocks, stage_blocks = self._wanted
            wanted = min(wanted, period * (model_blocks if stages == 1 else stage_blocks * stages))
        self.kept = max(self.kept, wanted)
        if wanted == len(longest):
            return
        used = {id(param) for block in list(longest.children())[:wanted] for param in block.parameters()}
        dropped = list(longest.children())[wanted:]
        for name, _ in list(longest.named_children())[wanted:]:
            delattr(longest, name)
        used |= {id(param) for param in model.parameters()}
        self._dropped |= {id(p): p for block in dropped for p in block.parameters() if id(p) not in used}

    def forget(self, optimizers: Iterable[Any]) -> None:
        """Remove the parameters of dropped blocks from optimizers."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [param for param in group["params"] if id(param) not in self._dropped]


def _block_lists(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and len(module) > 2
        if _period([_signature(block) for block in module.children()]) * 2 < len(module)
    ]


def _period(signatures: list[Any]) -> int:
    """Return after how many blocks the list begins again; its length if it does not."""
    for period in range(1, len(signatures)):
        if len(signatures) % period == 0 and all(
            signature == signatures[i % period] for i, signature in enumerate(signatures)
        ):
            return period
    return len(signatures)


def _signature(block: nn.Module) -> Any:
    """Return what makes two blocks equal: classes, shapes, and settings that are no counters."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, tuple(p.shape), p.dtype, p.requires_grad)
                for key, p in module._parameters.items()
                if p is not None
            ),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, bool))
                if not key.endswith(_COUNTED_AS_NAMES)
            ),
        )
        for name, module in block.named_modules()
    )


def convert_fake_modules() -> None:
    """Make `Module.to` and its like work: torch swaps fake tensors, which fails if anything refers to them weakly."""
    nn.Module._apply = _apply  # type: ignore[method-assign]


def _apply(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for module in self.children():
            _apply(module, function)
    with torch.no_grad():
        for name, param in self._parameters.items():
            if param is not None:
                _convert_parameter(self, name, param, function)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
    return self


def _convert_parameter(module: nn.Module, name: str, param: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    converted = function(param)
    if converted is param:
        return
    if converted.device == param.device and type(converted) is type(param.data):
        param.data = converted
    else:
        module._parameters[name] = nn.Parameter(converted, param.requires_grad)
    if param.grad is not None:
        module._parameters[name].grad = function(param.grad)  # type: ignore[union-attr]
