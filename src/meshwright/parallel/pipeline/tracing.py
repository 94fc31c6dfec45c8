"""Trace a forward pass on fake weights: which parameters each stage uses, and what it sends to the next.

[Note: stage boundaries] A stage runs the code in front of its own blocks itself, on the model's inputs and without
weights, so masks and positions are computed locally. It receives the rest, only as arguments of its first block: what
depends on parameters, and what was drawn at random, because another process would draw other numbers. The trace names
these arguments. It is made of one micro-batch and used for all of the same shape. So it may depend on shapes only, and
each stage checks that its own call has the arguments that the trace names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ...runtime.collectives.nested import named_leaves, recursively_apply, send_to_device, tensors_of
from ...runtime.devices.device import get_device_rng_state
from .cutting import CannotCutError, Partition, partition_model


@dataclass
class StageBoundary:
    """What one stage sends to the next: names, shapes and dtypes of arguments of the next stage's first block."""

    start: str = ""
    """The name of the block."""
    forms: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """Arguments by their path in the call, such as `[1]['hidden_states']`."""

    def extract(self, call: Any) -> tuple[Tensor, ...]:
        """Return the tensors to send from the arguments of a call."""
        given = dict(named_leaves(call))
        taken: list[Tensor] = []
        for name, (shape, _) in self.forms.items():
            tensor = given.get(name)
            if not isinstance(tensor, Tensor) or tensor.shape != shape:
                found = list(tensor.shape) if isinstance(tensor, Tensor) else tensor
                raise self._differs(f"argument {name} was a tensor of shape {list(shape)}, and is now {found!r:.80}")
            taken.append(tensor)
        return tuple(taken)

    def insert(self, call: Any, received: tuple[Tensor, ...]) -> Any:
        """Return the arguments of a call with the received tensors."""
        by_name = dict(zip(self.forms, received, strict=True))
        names = iter([name for name, leaf in named_leaves(call) if isinstance(leaf, Tensor)])

        def put(leaf: Tensor) -> Tensor:
            name = next(names)
            if name not in by_name and is_placeholder(leaf) and not isinstance(leaf, nn.Parameter):
                raise self._differs(f"argument {name} comes from an earlier stage now, and did not then")
            return by_name.pop(name, leaf)

        filled = recursively_apply(put, call)
        if by_name:
            raise self._differs(f"argument {next(iter(by_name))} came from an earlier stage then, and does not now")
        return filled

    def examples(self) -> tuple[Tensor, ...]:
        """Return meta tensors of these shapes and dtypes."""
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
            for shape, dtype in self.forms.values()
        )

    def _differs(self, how: str) -> CannotCutError:
        return CannotCutError(
            f"{self.start}, which begins a stage, is called otherwise than for the first micro-batch of this shape: "
            f"{how}. What a stage hands on may depend on the shapes of the inputs, not on their values. Always hand "
            "the block the same tensors, or cut elsewhere with PipelineConfig(split_at=[...])."
        )


@dataclass
class ForwardTrace:
    """The result of tracing one forward pass."""

    boundaries: list[StageBoundary]
    """The input boundaries of the stages after the first."""
    uses: dict[str, set[int]]
    """Parameter -> the stages that use it."""
    changes: list[str]
    """State that the forward pass changes on every stage, because its new value depends only on the inputs."""


def is_placeholder(tensor: Any) -> bool:
    """Return whether a tensor has no data because another stage has it, and not because nothing has in this run."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is not detect_fake_mode()


class MetaModel:
    """A copy of a model with fake parameters: they have a shape, a dtype and a device, but no data.

    Whatever is computed from fake tensors is fake too, while masks or positions that depend only on the model's inputs
    stay real. So a stage can run the code in front of its own blocks at no cost.
    """

    def __init__(self, model: nn.Module, partition: Partition, device: torch.device) -> None:
        self.partition = partition
        self._device = device
        mode = detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        copies: dict[int, Any] = {}
        self._names: dict[int, str] = {}

        def fake(name: str, tensor: Tensor) -> None:
            if id(tensor) not in copies:
                with mode:
                    fake_tensor = torch.empty_like(tensor, device=device, requires_grad=False)
                copies[id(tensor)] = (
                    nn.Parameter(fake_tensor, False) if isinstance(tensor, nn.Parameter) else fake_tensor
                )
                self._names[id(copies[id(tensor)])] = name

        for name, param in model.named_parameters():
            fake(name, param)
        for name, buffer in model.named_buffers():
            if partition.stage_of(name) is None:
                # Every stage has it, such as a mask or rotary frequencies. Copy it, because the trace may change it.
                copies[id(buffer)] = buffer.detach().to(device, copy=True)
            else:
                fake(name, buffer)
        try:
            self.model: nn.Module = copy.deepcopy(model, copies)
        except (TypeError, RuntimeError) as error:
            raise CannotCutError(
                f"A pipeline needs a copy of {type(model).__name__} without its weights, and something in it cannot "
                f"be copied: {error}."
            ) from error

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool = True) -> ForwardTrace:
        """Trace the forward pass once; raise `CannotCutError` if the model cannot be cut here."""
        self.model.train(training)
        args, kwargs = recursively_apply(torch.clone, (args, kwargs))  # a forward pass may write into its inputs
        tracer = _StageTracer(self._names, self.partition, self._device, _StageState(self.model, self.partition))
        hooks = [
            self.model.get_submodule(start).register_forward_pre_hook(tracer.entry_hook(index), with_kwargs=True)
            for index, start in enumerate(self.partition.starts, 1)
        ]
        try:
            with torch.no_grad(), tracer:
                outputs = self.model(*args, **kwargs)
        except CannotCutError:
            raise
        except Exception as error:
            raise CannotCutError(
                f"{type(self.model).__name__} could not be followed without computing it, which a pipeline needs: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}. A forward "
                "pass that looks at the values of activations, or calls an operator that torch knows no shapes for, "
                "can only be cut behind it. Experts of transformers can be followed after "
                "model.set_experts_implementation('batched_mm')."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        tracer.finish(outputs)
        return ForwardTrace(tracer.boundaries, tracer.uses, tracer.state.changes)


def partition_by_use(model: nn.Module, starts: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partition:
    """Assign every part of a model to the stage that uses it in a call with these arguments."""
    provisional = partition_model(model, starts, check_ties=False)
    uses = MetaModel(model, provisional, torch.device("cpu")).trace(*send_to_device((args, kwargs), "cpu")).uses
    return partition_model(model, starts, uses)


class _StageState:
    """State that a forward pass may change in modules that every stage has: saved buffers, and numbers."""

    def __init__(self, model: nn.Module, partition: Partition) -> None:
        self.changes: list[str] = []
        self._model = model
        self._partition = partition
        self._saved = [name for name in model.state_dict() if partition.stage_of(name) is None]
        self._cut_modules = [(name, model.get_submodule(name)) for name in partition.cut_modules]
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        buffers = dict(self._model.named_buffers())
        now: dict[str, Any] = {name: (buffers[name], buffers[name]._version) for name in self._saved if name in buffers}
        for owner, module in self._cut_modules:
            for own, value in vars(module).items():
                if isinstance(value, (int, float)):
                    now[f"{owner}.{own}" if owner else own] = value
        return now

    def require_known_after(self, stage: int) -> None:
        """Refuse state that a stage has changed, unless every stage can make the same change."""
        before, self._before = self._before, self._now()
        for name, value in self._before.items():
            old = before.get(name, value)
            tensor = value[0] if isinstance(value, tuple) else None
            same = value[0] is old[0] and value[1] == old[1] if tensor is not None else value == old
            if same:
                continue
            if stage > 0 or self._partition.part_of(name) is not None or hasattr(tensor, "_made_in_stage"):
                raise CannotCutError(
                    f"The forward pass changes {name} in stage {stage}, and the other stages, which have it too, "
                    "cannot do the same. Keep it in a module with parameters, which one stage owns, such as the block "
                    "or head that computes it, or outside of the model."
                )
            self.changes.append(name)


class _StageTracer(TorchFunctionMode):
    """Record for every operation in which stage it runs, and what it uses. See [Note: stage boundaries]."""

    def __init__(self, names: dict[int, str], partition: Partition, device: torch.device, state: _StageState) -> None:
        super().__init__()
        self.stage = 0
        self.uses: dict[str, set[int]] = {}
        self.boundaries = [StageBoundary(start) for start in partition.starts]
        self._names = names
        self._partition = partition
        self._device = device
        self.state = state

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record its inputs. One that returns no tensor only reads a shape or dtype."""
        generator = self._generator_state()
        versions = {id(leaf): leaf._version for leaf in tensors_of((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = tensors_of(args[0] if func is Tensor.__setitem__ else result)
        if not made:
            return result
        drawn = generator != self._generator_state()
        taken = [leaf for leaf in tensors_of((args, kwargs)) if self._is_stage_local(leaf)]
        for leaf in taken:
            self._record_use(leaf, getattr(func, "__name__", str(func)))
        for leaf in made:
            if versions.get(id(leaf)) == leaf._version:
                continue  # an argument, returned as it was: `type_as` with the same dtype
            if id(leaf) not in self._names and (drawn or taken or is_placeholder(leaf)):
                leaf._made_in_stage = self.stage  # type: ignore[attr-defined]
        return result

    def _generator_state(self) -> bytes:
        state = torch.get_rng_state().numpy().tobytes()
        return state if self._device.type == "cpu" else state + get_device_rng_state(self._device).numpy().tobytes()

    def _is_stage_local(self, tensor: Tensor) -> bool:
        """Return whether a tensor can only be computed in its stage."""
        return is_placeholder(tensor) or id(tensor) in self._names or hasattr(tensor, "_made_in_stage")

    def _record_use(self, tensor: Tensor, operation: str) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            self.uses.setdefault(name, set()).add(self.stage)
            return
        made_in = getattr(tensor, "_made_in_stage", self.stage)
        if made_in != self.stage:
            raise CannotCutError(
                f"A tensor of shape {list(tensor.shape)} is made in stage {made_in} and used in stage {self.stage} (by "
                f"{operation}), around the cut at {self._partition.starts[made_in]}: only what the block there is "
                "called with is handed on. Cut elsewhere with PipelineConfig(split_at=[...]), or hand it to the block."
            )

    def entry_hook(self, index: int) -> Callable[..., Any]:
        """Return a hook for the first block of a stage."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.stage != index - 1:
                order = f"while stage {self.stage} runs" if self.stage < index else "a second time"
                raise CannotCutError(
                    f"{self._partition.starts[index - 1]} should begin stage {index}, and the forward pass calls it "
                    f"{order}: name modules that are called once, in the order in which they are called."
                )
            self.state.require_known_after(self.stage)
            boundary = self.boundaries[index - 1]
            names = iter([name for name, leaf in named_leaves((args, kwargs)) if isinstance(leaf, Tensor)])

            def receive(leaf: Tensor) -> Tensor:
                name = next(names)
                if not self._is_stage_local(leaf) or id(leaf) in self._names:
                    return leaf
                self._record_use(leaf, f"the call of {self._partition.starts[index - 1]}")
                boundary.forms[name] = (leaf.shape, leaf.dtype)
                received = leaf.view_as(leaf)
                received._made_in_stage = index  # type: ignore[attr-defined]
                return received

            received = recursively_apply(receive, (args, kwargs))
            self.stage = index
            return received

        return hook

    def finish(self, outputs: Any) -> None:
        """Check that all stages ran, and that the last one computed the outputs."""
        starts = self._partition.starts
        if self.stage != len(starts):
            raise CannotCutError(
                f"The forward pass never calls {starts[self.stage]}, which should begin stage {self.stage + 1}: name "
                "modules that are called (a list of modules is not; the modules in it are)."
            )
        self.state.require_known_after(self.stage)
        for leaf in tensors_of(outputs):
            made_in = getattr(leaf, "_made_in_stage", self.stage)
            if made_in != self.stage:
                raise CannotCutError(
                    f"The model returns a tensor of shape {list(leaf.shape)} that stage {made_in} makes; only what "
                    f"the last stage makes can be returned. Switch it off (hidden states of all layers, for example)."
                )
