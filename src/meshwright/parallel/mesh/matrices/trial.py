"""Try an optimizer on small tensors that are spread like its parameters, before it steps the parameters.

[Note: trial] An optimizer that nobody knows here may fail on DTensors, or compute something else: a norm of the local
part, an operation that torch does not spread. Each shows in the first steps, or never. So `prepare` copies the
optimizer, gives one copy small plain tensors and another copy the same tensors spread as the parameters are, steps
both, and compares. What differs is refused with the remedy that was found to work: a third copy steps one tensor after
the other, and if that gives the same, `step_full_tensors` does. A trial that cannot be made says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....errors import UnsupportedSettingError
from ...base import params_of
from ...modules.dtensors import distribute_like, mesh_of, whole
from ...modules.memory.stepping import part_of
from ...modules.references import copy_onto, optimizers_in
from .stepping import is_a

_KNOWN = ("torch.optim.", "torchao.")
"""The modules of optimizers that are right on DTensors, or are refused or stepped whole by name."""
_STEPS = 3
_ALIKE = 2
"""Stand-ins for parameters that are spread alike, if there are many."""
_FEW = 32
"""The most parameters that all get stand-ins."""
_ROUNDING = 0.05
_MESSAGE = 200
"""Characters of another error's message."""


def require_right_on_spread(optimizer: Optimizer, *, stepped_whole: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that fails, or computes something else, on parameters that are spread as its own are.

    `stepped_whole` are those of it and the optimizers inside that step whole tensors, one by one.
    """
    parts = optimizer in stepped_whole
    if stepped_whole and not parts:
        return  # the one inside exchanges its parameters, which a copy cannot do
    if all(f"{type(each).__module__}.".startswith(_KNOWN) for each in optimizers_in(optimizer)):
        return
    trial = _Trial(optimizer)
    with _random_state_kept(params_of(optimizer)):
        objection = trial.objection_to_parts() if parts else trial.objection_to_spread()
    if objection is not None:
        name = type(optimizer).__name__
        setting = f"step_full_tensors({name})" if parts else f"{name} on sharded or split parameters"
        raise UnsupportedSettingError(setting, *objection)


def require_each_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step of one parameter depends on others, which are in other stages of a pipeline."""
    trial = _Trial(optimizer)
    with _random_state_kept(params_of(optimizer)):
        if is_a(optimizer, "LBFGS") or trial.depends_on_others():
            raise UnsupportedSettingError(
                f"{type(optimizer).__name__} with pp_size",
                "its step of one parameter depends on others, and each process has those of its stages.",
                "Train without stages, or use an optimizer that treats each parameter by itself.",
            )


@contextmanager
def _random_state_kept(params: Sequence[Tensor]) -> Iterator[None]:
    kinds = {param.device.type for param in params} - {"cpu", "meta"}
    with torch.random.fork_rng(devices=[]) if not kinds else torch.random.fork_rng(device_type=kinds.pop()):
        yield


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(one, other, strict=True))


def _chosen(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that get stand-ins: all, or if there are many some of each group that are spread alike."""
    few = len(params_of(optimizer)) <= _FEW
    counts: dict[Any, int] = {}
    chosen = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            kind = number, mesh_of(param), getattr(param, "placements", None), param.dim(), param.requires_grad
            counts[kind] = counts.get(kind, 0) + 1
            if (counts[kind] <= _ALIKE or few) and param.is_floating_point():
                chosen.append(param)
    return chosen


def _stand_in(param: Any, number: int) -> Tensor:
    """Return a small tensor that is divided like a parameter."""
    parts = [1] * param.dim()
    mesh = mesh_of(param)
    for size, placement in () if mesh is None else zip(mesh.shape, param.placements, strict=True):
        if not placement.is_replicate():
            parts[placement.dim] *= size
    sizes = [
        min(length, count * (2 + number % 2) + (length % count > 0)) if count > 1 else min(length, 3 + number % 2)
        for length, count in zip(param.shape, parts, strict=True)
    ]
    dtype = param.dtype if param.dtype.itemsize >= 4 else torch.float32
    return _numbers(sizes, 2 * number).to("cpu" if param.is_meta else param.device, dtype)


def _numbers(sizes: Sequence[int], seed: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class _Trial:
    """Runs of copies of one optimizer on stand-ins."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.chosen = _chosen(optimizer)
        self.expected: list[Tensor] = []
        self.with_closure = False

    def objection_to_spread(self) -> tuple[str, str] | None:
        """Return why the optimizer cannot step spread tensors, and what to do; None if nothing is wrong or known."""
        if not self._says_something():
            return None
        reason = "on small tensors that are spread as its parameters are it computes something else than on plain ones."
        try:
            if self._moved_alike(self.run(spread=True)):
                return None
        except Exception as error:
            message = " ".join(str(error).split())[:_MESSAGE]
            reason = f"it fails on tensors that are spread as its parameters are ({type(error).__name__}: {message})."
        remedy = "It can train without shards and split layers (DDP)."
        if self._treats_each_alone():
            remedy = f"Give it to step_full_tensors() of meshwright before prepare(). {remedy}"
        return reason, remedy

    def objection_to_parts(self) -> tuple[str, str] | None:
        """Return why the optimizer cannot step its parameters one by one, and what to do."""
        if not self._says_something() or self._treats_each_alone():
            return None
        inner = optimizers_in(self.optimizer)[1:]
        if inner:
            name = type(inner[0]).__name__
            return f"it holds another optimizer, {name}.", f"Give step_full_tensors() that one: the {name} inside."
        return (
            "it computes something else for each parameter alone than for all together.",
            "Train without shards and split layers (DDP), or use an optimizer that treats each matrix by itself.",
        )

    def depends_on_others(self) -> bool:
        """Return whether a parameter steps to something else if the others are missing."""
        if all(f"{type(each).__module__}.".startswith(_KNOWN) for each in optimizers_in(self.optimizer)):
            return False
        try:
            return self._says_something() and not all(
                _equal([value], [self.run(spread=False, only=number)[number]])
                for number, value in enumerate(self.expected)
            )
        except Exception:
            return False

    def _says_something(self) -> bool:
        """Step plain tensors; return whether that works, and gives the same twice."""
        for self.with_closure in (False, True):
            try:
                self.expected = self.run(spread=False)
                return bool(self.expected) and _equal(self.expected, self.run(spread=False))
            except Exception:
                continue
        return False

    def _moved_alike(self, found: Sequence[Tensor]) -> bool:
        """Compare movements, to a few percent: an optimizer that rounds to bfloat16 inside is right, too."""
        starts = [_stand_in(like, number) for number, like in enumerate(self.chosen)]
        return all(
            bool((one - other).abs().max() <= _ROUNDING * (one - start).abs().max() + 1e-6)
            for one, other, start in zip(self.expected, found, starts, strict=True)
            if start.numel()
        )

    def _treats_each_alone(self) -> bool:
        """Return whether stepping one plain tensor after the other gives the same."""
        try:
            return _equal(self.expected, self.run(spread=False, alone=True))
        except Exception:
            return False

    def run(self, *, spread: bool, alone: bool = False, only: int | None = None) -> list[Tensor]:
        """Return the stand-ins after some steps: of all together, of one after the other, or of only one of them."""
        params = [self._param(number, like, spread) for number, like in enumerate(self.chosen)]
        optimizer = self._copy(params, only)
        for step in range(_STEPS if optimizer is not None else 0):
            for number, (param, like) in enumerate(zip(params, self.chosen, strict=True)):
                if param.requires_grad and only in (None, number):
                    gradient = _numbers(param.shape, 1000 * step + 2 * number + 1).to(param.device, param.dtype)
                    param.grad = distribute_like(gradient, like) if spread else gradient
            for part in _parts(optimizer) if alone else [optimizer]:
                if self.with_closure:
                    part.step(lambda: torch.ones(()))
                else:
                    part.step()
        return [] if optimizer is None else [whole(param.detach()) for param in params]

    def _param(self, number: int, like: Tensor, spread: bool) -> Tensor:
        value = _stand_in(like, number)
        return nn.Parameter(distribute_like(value, like) if spread else value, requires_grad=like.requires_grad)

    def _copy(self, stand_ins: Sequence[Tensor], only: int | None) -> Any:
        own = {id(like): param for like, param in zip(self.chosen, stand_ins, strict=True)}
        made = copy_onto(self.optimizer, {id(param): own.get(id(param), param) for param in params_of(self.optimizer)})
        kept = {id(param) for number, param in enumerate(stand_ins) if only in (None, number)}
        for each in () if made is None else optimizers_in(made):
            for group in each.param_groups:
                group["params"] = [param for param in group["params"] if id(param) in kept]
            if hasattr(each, "train"):
                each.train()  # of a schedule-free optimizer
        return made


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer of each parameter, with the same state."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield part_of(optimizer, [{**group, "params": [param]}])
