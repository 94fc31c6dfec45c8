"""A model without its weights, and one forward pass through it: what each stage takes, and hands to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ..runtime.nested import leaves, recursively_apply, send_to_device
from .cutting import CannotCutError, Division, divide


@dataclass
class Handover:
    """What one stage hands to the next: which of the tensors that its first block is called with, and their form."""

    positions: list[int] = field(default_factory=list)
    forms: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)

    def taken_from(self, call: Any) -> tuple[Tensor, ...]:
        """Pick them from the arguments of a call."""
        tensors = tensors_of(call)
        return tuple(tensors[position] for position in self.positions)

    def examples(self) -> tuple[Tensor, ...]:
        """Return tensors of their form, without memory."""
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
            for shape, dtype in self.forms
        )


@dataclass
class Survey:
    """What one forward pass showed."""

    handovers: list[Handover]
    """What the stages after the first are handed."""
    uses: dict[str, set[int]]
    """Parameter -> the stages that take it."""


def tensors_of(data: Any) -> list[Tensor]:
    """Return the tensors in a nested container, left to right."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]


class Skeleton:
    """The structure of a model whose parameters have shapes, types and a device, and no values.

    Its parameters are fake tensors, and whatever is computed from one is fake too, while masks or positions that come
    from the model's inputs alone stay real. So a stage can run the code in front of its own blocks at no cost.
    """

    def __init__(self, model: nn.Module, division: Division, device: torch.device) -> None:
        self.division = division
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        copies: dict[int, Any] = {}
        self._names: dict[int, str] = {}

        def fake(name: str, tensor: Tensor) -> None:
            if id(tensor) not in copies:
                with mode:
                    ghost = torch.empty_like(tensor, device=device, requires_grad=False)
                copies[id(tensor)] = nn.Parameter(ghost, False) if isinstance(tensor, nn.Parameter) else ghost
                self._names[id(copies[id(tensor)])] = name

        for name, param in model.named_parameters():
            fake(name, param)
        for name, buffer in model.named_buffers():
            if division.stage_of(name) is None:
                # Every stage has it: a mask, or the frequencies of a position. A survey may count up a copy only.
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

    def survey(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Survey:
        """Run the forward pass once and see what each stage takes; refuse what cannot be cut."""
        watcher = _Watcher(self._names, self.division)
        hooks = [
            self.model.get_submodule(start).register_forward_pre_hook(watcher.begins(index), with_kwargs=True)
            for index, start in enumerate(self.division.starts, 1)
        ]
        try:
            with torch.no_grad(), watcher:
                outputs = self.model(*args, **kwargs)
        except CannotCutError:
            raise
        except Exception as error:
            raise CannotCutError(
                f"{type(self.model).__name__} could not be followed without computing it, which a pipeline needs: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}. A forward "
                "pass that looks at the values of activations, or calls an operator that torch knows no shapes for, "
                "can only be cut behind it."
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        watcher.finish(outputs)
        return Survey(watcher.handovers, watcher.uses)


def divided_by_use(model: nn.Module, starts: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Division:
    """Give every part of a model to the stage that takes it when the model is called like this."""
    anywhere = divide(model, starts, check_ties=False)
    uses = Skeleton(model, anywhere, torch.device("cpu")).survey(*send_to_device((args, kwargs), "cpu")).uses
    return divide(model, starts, uses)


class _Watcher(TorchFunctionMode):
    """Note for every operation in which stage it runs, and what it takes."""

    def __init__(self, names: dict[int, str], division: Division) -> None:
        super().__init__()
        self.stage = 0
        self.uses: dict[str, set[int]] = {}
        self.handovers = [Handover() for _ in division.starts]
        self._names = names
        self._division = division

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation. One that returns no tensor only looks at a shape or type, and takes nothing."""
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tensors_of(result) if isinstance(leaf, FakeTensor)]
        if made:
            for leaf in tensors_of((args, kwargs)):
                if isinstance(leaf, FakeTensor):
                    self._take(leaf, getattr(func, "__name__", str(func)))
            for leaf in made:
                if id(leaf) not in self._names:
                    leaf._made_in_stage = self.stage  # type: ignore[attr-defined]
        return result

    def _take(self, tensor: Tensor, operation: str) -> None:
        name = self._names.get(id(tensor))
        if name is not None:
            self.uses.setdefault(name, set()).add(self.stage)
            return
        made_in = getattr(tensor, "_made_in_stage", self.stage)
        if made_in != self.stage:
            raise CannotCutError(
                f"A tensor of shape {list(tensor.shape)} is made in stage {made_in} and used in stage {self.stage} (by "
                f"{operation}), around the cut at {self._division.starts[made_in]}: only what the block there is "
                "called with is handed on. Cut elsewhere with PipelineConfig(split_at=[...]), or hand it to the block."
            )

    def begins(self, index: int) -> Callable[..., Any]:
        """Return a hook for the block that begins a stage."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.stage != index - 1:
                order = f"while stage {self.stage} runs" if self.stage < index else "a second time"
                raise CannotCutError(
                    f"{self._division.starts[index - 1]} is to begin stage {index}, and the forward pass calls it "
                    f"{order}: name modules that are called once, in the order in which they are called."
                )
            handover = self.handovers[index - 1]
            position = -1

            def receive(leaf: Tensor) -> Tensor:
                nonlocal position
                position += 1
                if not isinstance(leaf, FakeTensor) or id(leaf) in self._names:
                    return leaf
                self._take(leaf, f"the call of {self._division.starts[index - 1]}")
                handover.positions.append(position)
                handover.forms.append((leaf.shape, leaf.dtype))
                received = leaf.view_as(leaf)
                received._made_in_stage = index  # type: ignore[attr-defined]
                return received

            received = recursively_apply(receive, (args, kwargs))
            self.stage = index
            return received

        return hook

    def finish(self, outputs: Any) -> None:
        """Check that all stages ran, and that the last one makes what the model returns."""
        starts = self._division.starts
        if self.stage != len(starts):
            raise CannotCutError(
                f"The forward pass never calls {starts[self.stage]}, which is to begin stage {self.stage + 1}: name "
                "modules that are called (a list of modules is not; the modules in it are)."
            )
        for leaf in tensors_of(outputs):
            made_in = getattr(leaf, "_made_in_stage", self.stage)
            if isinstance(leaf, FakeTensor) and made_in != self.stage:
                raise CannotCutError(
                    f"The model returns a tensor of shape {list(leaf.shape)} that stage {made_in} makes; only what "
                    f"the last stage makes can be returned. Switch it off (hidden states of all layers, for example)."
                )
