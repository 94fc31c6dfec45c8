"""Record what one process computes: calls of modules, gradients, norms and parameters, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from ....parallel.modules.dtensors import local, whole
from ....parallel.modules.unwrapping import extract_model_from_parallel, own_name
from ....runtime.collectives.nested import named_leaves
from ....runtime.modules import tied_names
from .data import Call, Dropout, RecordedStep, Recording, Tensors


class StepRecorder:
    """The recorder of one process. It sends nothing but what makes sharded tensors whole."""

    def __init__(self, recording: Recording, after_step: Callable[[], None] = lambda: None) -> None:
        self.recording = recording
        self.step = RecordedStep()
        """The step under way."""
        self.positions: Tensor | None = None
        """The positions of each sequence that this process holds at the moment."""
        self._after_step = after_step
        self._models: list[nn.Module] = []
        self._in_backward = False
        self._stack: list[str] = []
        """Names of the modules that are being called."""

    @classmethod
    def of_rank(cls, strategy: Any, after_step: Callable[[], None] = lambda: None) -> StepRecorder:
        """Return the recorder of a rank of a mesh."""
        recording = Recording(
            rank=strategy.runtime.process_index,
            sizes=_sizes_of(strategy),
            coordinates=_coordinates_of(strategy),
            data_ranks=strategy.num_data_ranks,
            data_rank=strategy.data_rank,
        )
        return cls(recording, after_step)

    def watch_model(self, model: nn.Module) -> None:
        """Record the calls of a model and of its modules from now on. It is in its final form."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        self._models.append(inner)
        self._record_calls(inner)
        named = inner.named_parameters(remove_duplicate=False)
        self.recording.ties += map(tuple, tied_names((own_name(name), param) for name, param in named))
        with torch.no_grad():
            self.recording.initial = {
                name: _copy(whole(tensor)) for name, tensor in self._named(parameters=True, buffers=True)
            }

    def parameters(self) -> Iterator[Tensor]:
        """Yield every parameter of the models once."""
        seen: set[int] = set()
        for model in self._models:
            for param in model.parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield param

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Record the steps of an optimizer from now on."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._finish_step)

    def note_pass(self, loss: Tensor, *, is_sum: bool, is_last: bool) -> None:
        """Record a backward pass that has ended; the last one of a step leaves its gradients."""
        self.step.losses.append(float(whole(loss.detach()).sum()))
        self.step.sums.append(is_sum)
        if is_last:
            self.step.gradients = self._gradients()

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Record no calls inside the context: modules are called again where activations are recomputed."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    @property
    def _passes(self) -> int:
        return len(self.step.losses)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.step.clipped = self._gradients()
        self.step.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def _finish_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            self.step.parameters = {name: _copy(whole(tensor)) for name, tensor in self._named(parameters=True)}
        self.recording.steps.append(self.step)
        self.step = RecordedStep()
        self._after_step()

    def _gradients(self) -> Tensors:
        with torch.no_grad():
            return {
                name: _copy(whole(param.grad)) for name, param in self._named(parameters=True) if param.grad is not None
            }

    def _named(self, *, parameters: bool = False, buffers: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers with their names in the user's models; those of other stages are left out."""
        for index, model in enumerate(self._models):
            found: list[tuple[str, Tensor]] = []
            if parameters:
                found += model.named_parameters(remove_duplicate=False)
            if buffers:
                found += model.named_buffers(remove_duplicate=False)
            for name, tensor in found:
                if tensor.device.type != "meta":
                    yield _prefix(index) + own_name(name), tensor

    def _record_calls(self, model: nn.Module) -> None:
        prefix = _prefix(len(self._models) - 1)
        for name, module in model.named_modules():
            full = prefix + own_name(f"{name}.").rstrip(".")
            self.recording.classes[full] = _class_of(module)
            begin, end = self._hooks_of(full, _class_of(module))
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(end)

    def _hooks_of(self, name: str, kind: str) -> tuple[Any, Any]:
        open_calls: list[Call | None] = []

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._stack.append(name)
            is_dry = not torch.is_grad_enabled() or any(_has_no_data(leaf) for _, leaf in _tensors((args, kwargs)))
            if self._in_backward or is_dry or not module.training:
                open_calls.append(None)
                return None
            call = Call(module=name, kind=kind, number=self._passes, positions=self.positions)
            open_calls.append(call)
            for label, tensor in _tensors((args, kwargs)):
                if tensor.is_floating_point() or name == "" or name.endswith(":"):
                    call.inputs[label] = _copy(local(tensor))
            return _with_aliases(args, kwargs, call)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack and self._stack[-1] == name:
                self._stack.pop()
            call = open_calls.pop() if open_calls else None
            if call is None or any(_has_no_data(leaf) for _, leaf in _tensors(output)):
                return
            for label, tensor in _tensors(output):
                if tensor.is_floating_point():
                    call.outputs[label] = _copy(local(tensor))
                    _keep_gradient(tensor, call.output_gradients, label)
            self.step.calls.append(call)

        return begin, end

    def note_dropout(self, tensor: Tensor) -> None:
        """Record a dropout of the first forward pass."""
        is_first_pass = not self.recording.steps and self._passes == 0 and not self._in_backward
        if is_first_pass and not _has_no_data(tensor):  # a pipeline traces the model on fake tensors
            self.recording.dropouts.append(
                Dropout(
                    module=self._stack[-1] if self._stack else "",
                    generator=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
                    input=zlib.crc32(_copy(local(tensor)).contiguous().numpy().tobytes()),
                )
            )


def _prefix(index: int) -> str:
    return f"model {index + 1}:" if index else ""


def _class_of(module: nn.Module) -> str:
    """Return the name of a module's class in the user's code; FSDP2 makes classes of its own."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if hasattr(module, "set_requires_gradient_sync") else name


def _sizes_of(strategy: Any) -> dict[str, int]:
    if strategy.mesh is None:
        return {"dp_replicate": strategy.runtime.num_processes}
    config = strategy.mesh.config
    return {axis: config.size(axis) for axis in config.active_mesh_dims}


def _coordinates_of(strategy: Any) -> dict[str, int]:
    if strategy.mesh is None:
        return {"dp_replicate": strategy.runtime.process_index}
    mesh = strategy.mesh.device_mesh
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _tensors(data: Any) -> list[tuple[str, Tensor]]:
    return [(label, leaf) for label, leaf in named_leaves(data) if isinstance(leaf, Tensor)]


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _with_aliases(args: Any, kwargs: Any, call: Call) -> tuple[Any, Any]:
    """Return the arguments with an alias for every tensor that needs a gradient: each user of it has its own then."""

    def aliased(label: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or isinstance(leaf, nn.Parameter):
            return leaf
        alias = leaf.view_as(leaf)
        _keep_gradient(alias, call.input_gradients, label)
        return alias

    positional = tuple(aliased(f"[0][{i}]", arg) for i, arg in enumerate(args))
    return positional, {name: aliased(f"[1][{name!r}]", arg) for name, arg in kwargs.items()}


def _keep_gradient(tensor: Tensor, gradients: Tensors, label: str) -> None:
    if not tensor.requires_grad:
        return

    def keep(gradient: Tensor) -> None:
        gradients[label] = _copy(local(gradient))

    tensor.register_hook(keep)  # type: ignore[no-untyped-call]
