"""`torch.compile` for models that a strategy has placed and wrapped: whole, or only their repeated blocks.

[Note: order] A model is compiled after it is wrapped. torch requires that with DDP, whose buckets then determine the
graph breaks, so that gradient reduction overlaps with the backward pass. FSDP2's hooks stay outside the graphs.

[Note: regions] A block is compiled in place by `Module.compile`, which changes neither the module nor the names in its
state. torch caches compiled code per function and not per object, so all blocks of a class share one compilation. The
rest stays eager: compiling it would trace through the blocks again, which costs as much as the whole model, and an
embedding or a head alone gains nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ..config.plugins.compilation import TorchDynamoPlugin
from ..runtime.group.runtime import rank_of_this_process
from .base import Bundle, Strategy
from .modules.dtensors import any_dtensor
from .modules.memory.offloading import refuse_offloaded
from .modules.unwrapping import is_compiled_module

logger = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def compiling(strategy: Strategy, plugin: TorchDynamoPlugin) -> Strategy:
    """Return a strategy that also compiles, or the same one if compilation is off."""
    if not plugin.compiles:
        return strategy
    return cast("Strategy", _Compiling(strategy, plugin))


class _Compiling:
    """A strategy that compiles its models; other methods are called with the uncompiled model."""

    def __init__(self, strategy: Strategy, plugin: TorchDynamoPlugin) -> None:
        self._strategy = strategy
        self._plugin = plugin

    def prepare(self, bundle: Bundle) -> Bundle:
        """Place, wrap, then compile the models."""
        for model in bundle.models:
            refuse_offloaded(model, f"dynamo_backend={self._plugin.backend}")
        if self._strategy.capabilities.compiles_inside:
            for model in bundle.models:
                compile_regions_deepspeed(model, **self._plugin.to_kwargs())
            return self._strategy.prepare(bundle)
        prepared = self._strategy.prepare(bundle)
        return replace(prepared, models=[compiled(model, self._plugin) for model in prepared.models])

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Leave gradients unreduced inside the context."""
        return self._strategy.no_sync(uncompiled(model))

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Reduce gradients in the next backward pass although its forward pass ran in `no_sync`."""
        return self._strategy.resume_sync(uncompiled(model))

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of a model, with uncompiled names."""
        return self._strategy.full_state_dict(uncompiled(model))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compile a model as the plugin says, unless it or a submodule is compiled already."""
    if has_compiled_regions(model):
        _log_on_main("The model is compiled already, and stays as it is.")
        return model
    if plugin.use_regional_compilation:
        return compile_regions(model, **plugin.to_kwargs())
    return _whole(model, plugin.to_kwargs())


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given, or the model itself."""
    return cast("nn.Module", model._orig_mod) if is_compiled_module(model) else model


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a module in place and return it; without blocks, compile the whole module."""
    return module if _compile_blocks(module, compile_kwargs) else _whole(module, compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a sharded module, or the whole module, in place; return it."""
    if not _compile_blocks(module, compile_kwargs):
        module.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of a module for DeepSpeed, or the whole module, in place."""
    compile_regions_fsdp2(module, **compile_kwargs)


def _compile_blocks(module: nn.Module, options: dict[str, Any]) -> bool:
    """Compile the repeated blocks in place; return whether there are any."""
    blocks = list(compilable_blocks(module))
    name = type(module).__name__
    if not blocks:
        _log_on_main(f"{name} has no repeated blocks of a class with a forward of its own: it is compiled whole.")
        return False
    for block in blocks:
        if not _is_compiled(block):
            block.compile(**options)
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
    _log_on_main(f"Compiled the {len(blocks)} blocks ({kinds}) of {name}; the rest runs eagerly.")
    return True


def compilable_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that share a list or sequence with others of their class.

    Modules with torch's own forward are left out: the compiler does not start a graph in torch's files, so compiling
    them would silently do nothing.
    """
    own = [child for child in module.children() if not _runs_torchs_own_forward(child)]
    kinds = [type(child) for child in own]
    repeated = [child for child in own if kinds.count(type(child)) > 1] if isinstance(module, _CONTAINERS) else []
    yield from repeated
    for child in module.children():
        if child not in repeated:
            yield from compilable_blocks(child)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module or any submodule is compiled."""
    return any(_is_compiled(part) for part in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether any parameter of a model is a DTensor."""
    return any_dtensor(model.parameters())


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or module._compiled_call_impl is not None


def _whole(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    return cast("nn.Module", torch.compile(module, **options))


def _runs_torchs_own_forward(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)  # a scripted module has none in its class
    return getattr(forward, "__module__", "torch.jit").startswith(("torch.nn.", "torch.jit"))


def _log_on_main(text: str) -> None:
    if rank_of_this_process() == 0:
        logger.info(text)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether this is a list of modules of one class."""
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or holds, a list of modules of one class."""
    return any(map(is_repeated_blocks, module.modules()))
