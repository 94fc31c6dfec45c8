"""What a try must not change: prepared objects, random generators and counters of an Accelerator, kept and put back."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.commit.staging import Staging
from ...checkpoint.parts.states import ProgressPart
from ...runtime.devices.device import clear_device_cache

_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")
_REGISTERED = ("custom_objects", "save_hooks", "load_hooks")
_OF_OPTIMIZER = ("steps_taken", "_step_was_skipped", "before_first_step")
_OF_LOADER = ("iteration", "_is_in_epoch")
_OF_WINDOW = ("step", "_models", "_items", "_items_came_at", "_has_mean_loss", "_reference")


class Kept:
    """The state of an Accelerator at one moment, in host memory; `restore` may be called many times.

    Models and optimizers that are prepared at that moment get their values back. What is prepared later is forgotten.
    Loaders get back the number of their epoch and their generators; one that is in an epoch restarts it.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._lists = {name: list(getattr(accelerator, name)) for name in _LISTS}
        checkpointer = accelerator.checkpointer
        self._registered = {name: copy.copy(getattr(checkpointer, name)) for name in _REGISTERED}
        staging = Staging()
        # The progress is left out: to restore it would make loaders resume instead of begin.
        self._parts = [
            (part, staging.copy(part.name, part.capture()))
            for part in checkpointer.own_parts(None)
            if not isinstance(part, ProgressPart)
        ]
        staging.synchronize()
        self._buffers = [(buffer, _on_host(buffer)) for model in self.models for buffer in model.buffers()]
        self._gradients = [
            (param, None if param.grad is None else param.grad.clone())
            for model in self.models
            for param in model.parameters()
        ]
        self._scaler = _attributes(accelerator.scaler) if accelerator.scaler is not None else {}
        self._window = {name: getattr(accelerator.window, name) for name in _OF_WINDOW}
        self._active_loaders = accelerator.gradient_state._loaders[1:]
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for loader in self.loaders:
            self.keep_generators(loader)
        self._others = [
            (owner, {name: getattr(owner, name) for name in names})
            for owners, names in ((self._lists["_optimizers"], _OF_OPTIMIZER), (self.loaders, _OF_LOADER))
            for owner in owners
        ]

    @property
    def models(self) -> list[Any]:
        """Return the models that were prepared."""
        return self._lists["_models"]

    @property
    def loaders(self) -> list[Any]:
        """Return the loaders that were prepared."""
        return self._lists["_dataloaders"]

    def keep_generators(self, loader: Any) -> None:
        """Keep the generators that a loader draws from, which may be older than the loader."""
        samplers = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        known = [id(generator) for generator, _ in self._generators]
        for generator in {id(each): each for each in found if isinstance(each, torch.Generator)}.values():
            if id(generator) not in known:
                self._generators.append((generator, generator.get_state()))

    def restore(self) -> None:
        """Put everything back, and free what came later."""
        accelerator = self._accelerator
        for name, objects in self._lists.items():
            getattr(accelerator, name)[:] = objects
        for name, registered in self._registered.items():
            setattr(accelerator.checkpointer, name, copy.copy(registered))
        for param, gradient in self._gradients:
            param.grad = None if gradient is None else gradient.clone()
        if self._scaler:
            vars(accelerator.scaler).update(_copied(self._scaler))
        for owner, values in self._others:
            vars(owner).update(values)
        for name, value in self._window.items():
            setattr(accelerator.window, name, value)
        accelerator.gradient_state.sync_gradients = True
        accelerator.gradient_state._loaders[1:] = self._active_loaders
        _forget_compiled()
        clear_device_cache(garbage_collection=True)
        for part, content in self._parts:  # the generators are the last of them
            part.restore(copy.deepcopy(content))
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for generator, position in self._generators:
            generator.set_state(position)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _attributes(scaler: Any) -> dict[str, Any]:
    return _copied(vars(scaler))


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else copy.copy(value) for name, value in values.items()}


def _forget_compiled() -> None:
    """Drop what torch has compiled for the size of a try: the next size would be compiled for sizes of any kind."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
