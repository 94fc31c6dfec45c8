"""Hooks on the gradients of parameters that are replaced, and of those that FSDP2 gathers.

[Note: gradient hooks] A hook is registered on a tensor, and sharding or splitting makes a new one. FSDP2 moreover
computes with a gathered parameter, the same object in every pass, and assigns the gradient of the sharded one itself:
hooks of `register_hook` would never run. So they run on the gathered parameter. There they see the gradient of this
process in the shape of the model, before it is averaged, as under DDP. Under tensor parallelism a hook from before
`prepare` is given the whole gradient. Hooks after accumulation see the sharded parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedSettingError
from ...runtime.collectives.nested import leaves
from .dtensors import distribute_like, mesh_of, whole

Hook = Callable[[Tensor], "Tensor | None"]


def carry_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks of a parameter run for the one that replaces it, until their handles are removed."""
    before: Mapping[Any, Hook] | None = old._backward_hooks
    after: Mapping[Any, Hook] | None = getattr(old, "_post_accumulate_grad_hooks", None)
    if not (before or after):
        return
    trains = new.requires_grad
    new.requires_grad_(True)  # a hook needs it, and frozen parameters may be trained later
    if before:
        new.register_hook(lambda gradient: _run(before, gradient))  # type: ignore[no-untyped-call]
    if after:
        new.register_post_accumulate_grad_hook(lambda param: _run_after(after, param))  # type: ignore[no-untyped-call]
    new.requires_grad_(trains)


def _run(hooks: Mapping[Any, Hook], gradient: Tensor) -> Tensor:
    given = gradient if mesh_of(gradient) is None else whole(gradient)
    result = given
    for hook in list(hooks.values()):
        changed = hook(result)
        result = result if changed is None else changed
    return gradient if result is given and given is not gradient else distribute_like(result, gradient)


def _run_after(hooks: Mapping[Any, Any], param: Tensor) -> None:
    for hook in list(hooks.values()):
        hook(param)


def run_on_gathered(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let hooks that sharded parameters get from now on run on the gathered ones."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and mesh_of(param) is not None:
                param.register_hook = _Gathered(module, name, param, units)  # type: ignore[method-assign]


class _Gathered:
    """What `register_hook` is for a sharded parameter."""

    def __init__(self, owner: nn.Module, name: str, sharded: Tensor, units: Sequence[nn.Module]) -> None:
        self._owner, self._name, self._sharded, self._units = owner, name, ref(sharded), units
        self._hooks: dict[int, Hook] = OrderedDict()
        self._waiting: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()  # a pickled parameter has no gathered one

    def __call__(self, hook: Hook) -> RemovableHandle:
        if not self._hooks and not self._waiting:
            around = [unit for unit in self._units if any(self._owner is inside for inside in unit.modules())]
            self._waiting = [unit.register_forward_pre_hook(self._attach) for unit in around]
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def _attach(self, unit: nn.Module, args: Any) -> None:
        """Run the hooks on the gathered parameter, once a unit has it: FSDP2's own hook of the unit came before."""
        gathered = self._owner._parameters[self._name]
        if gathered is None or gathered is self._sharded() or not gathered.requires_grad:
            return
        for handle in self._waiting:
            handle.remove()
        gathered.register_hook(lambda gradient: _run(self._hooks, gradient))  # type: ignore[no-untyped-call]


def refuse_graphs_of_gradients(model: nn.Module, spread: str) -> None:
    """Raise in backward passes of the model's outputs that record a graph: its gradients would be wrong."""

    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise UnsupportedSettingError(
                f"create_graph=True with {spread}",
                "torch cannot differentiate the collectives of sharded parameters and split layers twice: gradients "
                "of gradients would be wrong.",
                "Train a model with gradient penalties or Hessians on whole copies (DDP).",
            )

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(refuse)  # type: ignore[no-untyped-call]

    model.register_forward_hook(watch)
