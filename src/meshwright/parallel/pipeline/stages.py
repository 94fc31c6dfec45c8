"""A pipeline stage: the model's own forward pass, in which only this stage's blocks are real.

See [Note: cutting] in `cutting.py`. A stage is a view of the user's model: it shares every module that it owns, copies
the few that are cut, and has placeholders for modules of other stages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...runtime.collectives.nested import tensors_of
from ...runtime.modules import owner_of
from ..modules.placeholder import Placeholder
from .cutting import CannotCutError, Partition
from .tracing import MetaModel, StageBoundary, is_placeholder


class StageExit(Placeholder):
    """Replace the first block of the next stage: it ends the forward pass with the arguments it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward pass."""
        raise _StageExitReached((args, kwargs))


class _StageExitReached(BaseException):  # not an Exception, so that no `except` in a forward pass catches it
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call


class StageView:
    """One stage on this process. `module` is what torch's pipeline runs: `module(received, args, kwargs)`."""

    def __init__(self, model: nn.Module, partition: Partition, meta_model: MetaModel, index: int) -> None:
        self.index = index
        self.is_last = index == partition.num_stages - 1
        self.input_boundary = self.output_boundary = StageBoundary()
        self.output: Any = None
        """The output of the last stage, which gives the structure of its tensors."""
        self._partition = partition
        self._received: tuple[Tensor, ...] | None = None
        self._copies: list[tuple[nn.Module, nn.Module]] = []
        self.module = self._view_of(model, "", meta_model)
        self._forward = self.module.forward
        self.module.forward = self._run
        self._entry = model.get_submodule(partition.starts[index - 1]) if index else None

    def _view_of(self, module: nn.Module, name: str, meta_model: MetaModel) -> nn.Module:
        view = _shallow_copy(module)
        for own in list(view._parameters):
            full = f"{name}.{own}" if name else own
            if view._parameters[own] is not None and self._partition.loose_parameters[full] != self.index:
                replace_by_meta(view, own, meta_model.model.get_submodule(name))
        for own, child in module._modules.items():
            if child is not None:
                view._modules[own] = self._child_view(child, f"{name}.{own}" if name else own, meta_model)
        self._copies.append((module, view))
        return view

    def _child_view(self, child: nn.Module, name: str, meta_model: MetaModel) -> nn.Module:
        if name in self._partition.cut_modules:
            return self._view_of(child, name, meta_model)
        if not self.is_last and name == self._partition.starts[self.index]:
            return StageExit(meta_model.model.get_submodule(name))
        if self._partition.parts[name] not in (None, self.index) and not isinstance(child, Placeholder):
            return Placeholder(meta_model.model.get_submodule(name))
        return child

    def register_entry_hook(self) -> None:
        """Hook the first block. Call it after all other hooks are registered, because this one must run first."""
        if self._entry is not None:
            self._entry.register_forward_pre_hook(self._receive, prepend=True, with_kwargs=True)

    def write_back(self) -> None:
        """Write the parameters and buffers that sharding put into the copies back to the user's model."""
        for original, view in self._copies:
            original._buffers.update(view._buffers)
            for own, param in view._parameters.items():
                if param is not None:
                    original._parameters[own] = param

    def sync_from_model(self) -> None:
        """Copy what was set on the user's model since: training mode, buffers, and other attributes."""
        for original, view in self._copies:
            _copy_attributes(original, view)

    def sync_to_model(self) -> None:
        """Copy what the forward pass has set to the user's model: buffers and other attributes."""
        for original, view in self._copies:
            _copy_attributes(view, original)

    def _receive(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._received is None:  # not called by this stage: recomputed, or in front of another stage
            return None
        received, self._received = self._received, None
        return self.input_boundary.insert((args, kwargs), received)

    def _run(self, received: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Run the model's forward pass from this stage's first block to the next stage, or to the end."""
        self._received = received if self.index else None
        try:
            self.output = self._forward(*args, **kwargs)
        except _StageExitReached as reached:
            outputs = self.output_boundary.extract(reached.call)
        else:
            # torch detaches outputs in place after their backward pass, so a parameter is returned as a view.
            outputs = tuple(
                leaf.view_as(leaf) if isinstance(leaf, nn.Parameter) else leaf for leaf in tensors_of(self.output)
            )
        skipped, self._received = self._received is not None, None
        if skipped:
            raise CannotCutError(
                f"The forward pass did not call {self.input_boundary.start}, which begins stage {self.index}, although "
                "it did for other micro-batches of this shape: the block that begins a stage cannot be skipped."
            )
        return outputs


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module with its own dicts of hooks and children."""
    view = type(module).__new__(type(module))
    view.__dict__.update(vars(module))
    for key, value in vars(module).items():
        if key.startswith("_") and isinstance(value, dict):
            view.__dict__[key] = value.copy()
    if "forward" in vars(module):
        view.__dict__["forward"] = copy.deepcopy(vars(module)["forward"], {id(module): view})
    return view


def _copy_attributes(source: nn.Module, target: nn.Module) -> None:
    for key, value in vars(source).items():
        if key.startswith("_") or key == "forward" or is_placeholder(value):
            continue
        if vars(target).get(key) is not value:
            target.__dict__[key] = value
    target._buffers.update(source._buffers)


def replace_by_meta(module: nn.Module, own: str, meta_module: nn.Module) -> None:
    """Replace a parameter of a module by a fake one."""
    del module._parameters[own]
    module.__dict__[own] = meta_module._parameters[own]


def prune_to_stages(model: nn.Module, partition: Partition, meta_model: MetaModel, stages: Sequence[int]) -> None:
    """Replace everything in the user's model that these stages do not own."""
    for full, stage in partition.loose_parameters.items():
        if stage not in stages:
            owner, own = owner_of(model, full)
            replace_by_meta(owner, own, owner_of(meta_model.model, full)[0])
    for full, part_stage in partition.parts.items():
        if part_stage is not None and part_stage not in stages:
            owner, own = owner_of(model, full)
            owner._modules[own] = Placeholder(meta_model.model.get_submodule(full))
