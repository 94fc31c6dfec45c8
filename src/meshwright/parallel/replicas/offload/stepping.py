"""Update the parameters of a block as soon as its gradients are complete, where that changes nothing.

[Note: steps in the backward pass]
A block may step before the others if the optimizer treats every parameter alone, and if nothing that the step depends
on changes between the backward pass and `step()`: gradients (by clipping, accumulation, or the script itself), options
of the optimizer, parameters. This is not announced by anyone, so the first step is only watched: it is made after the
backward pass. From then on blocks step on another thread, and `step()` updates the rest. If a later step is not like
the first one, an error says so, where the difference begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....errors import UnsupportedSettingError
from ...modules.memory.stepping import options_of, part_of
from .blocks import Block
from .watching import WatchedGradient

_REMEDY = "Give OffloadConfig(step_in_backward=False)."


class Watched(NamedTuple):
    """A parameter and its gradient before or after a step of its block."""

    param: nn.Parameter
    gradient: Tensor
    watched: Tensor
    """What stands for the gradient; itself, where it is of another class, as in a plan."""
    seen: tuple[int, int, int]
    """The version of the gradient, and place and version of the parameter."""

    @property
    def has_new_gradient(self) -> bool:
        """Return whether the gradient was changed or replaced."""
        return self.param.grad is not self.watched or self.gradient._version != self.seen[0]

    @property
    def has_changed(self) -> bool:
        """Return whether the parameter was changed."""
        return (_place_of(self.param), self.param._version) != self.seen[1:]


class BlockSteps:
    """The optimizers of offloaded blocks."""

    def __init__(self, step_in_backward: bool | None, on_disk: bool, blocks: Callable[[], Iterable[Block]]) -> None:
        self._on_disk = on_disk
        self.decision = step_in_backward
        """Whether blocks step in the backward pass; None while it is not known."""
        self.accumulation_steps = 1
        self.on_step: Callable[[], None] = lambda: None
        """Called after every step of an optimizer."""
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._blocks = blocks
        self._stepped: WeakKeyDictionary[Optimizer, list[Watched]] = WeakKeyDictionary()
        """What has been updated since the last `step()`."""
        self._candidates: list[Watched] = []
        """What would have been updated in the backward pass that decides."""
        self._options: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()
        self._num_backward = 0

    def __deepcopy__(self, memo: Any) -> BlockSteps:
        return self

    def add(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow the steps of optimizers that have parameters of blocks."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UnsupportedSettingError(
                    "offload with LBFGS", "it makes one vector of all gradients.", "Use another optimizer."
                )
            self._optimizers.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            if self._on_disk:
                optimizer.register_load_state_dict_post_hook(self._keep_state)

    # --- forward and backward passes --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Refuse to compute with parameters that are ahead of `step()`."""
        if self._num_backward and self.decision is None:
            self.decision = False
        self.refuse_if_stepped("a forward pass began")

    def begin_backward(self) -> None:
        """Refuse a second backward pass if the first one has updated blocks already."""
        self.refuse_if_stepped("a second one began")
        self._forget_candidates()
        for optimizer in self._optimizers:
            self._options[optimizer] = options_of(optimizer)

    def refuse_if_stepped(self, event: str) -> None:
        """Raise an error if blocks were updated in the last backward pass and `step()` has not been called since."""
        if self._stepped:
            raise RuntimeError(
                f"The blocks were updated in the last backward pass, and {event} before optimizer.step(): steps cannot "
                f"be skipped, and gradients of several passes are not added up. {_REMEDY}"
            )

    def end_backward(self) -> None:
        """Watch the gradients, to see until the next step whether somebody changes them."""
        self._num_backward += 1
        if self.decision is None and self._num_backward == 1:
            self._candidates = [
                self._watch(param) for block in self._blocks() for param in block.params if param.grad is not None
            ]

    def gradient_came_late(self, block: Block) -> None:
        """Refuse more gradients for a block that steps, or has stepped, in this backward pass."""
        if self.decision:
            raise RuntimeError(
                f"{block.name} was updated in the backward pass, and got more gradients in the same pass: by reentrant "
                f"recomputation of several uses, or a use of its parameters outside of it. {_REMEDY}"
            )
        self.decision = False

    def step(self, block: Block) -> None:
        """Update the parameters of a block, if blocks step in the backward pass."""
        if self.decision:
            for optimizer in list(self._optimizers):
                self._step(optimizer, block)

    def _step(self, optimizer: Optimizer, block: Block) -> None:
        part, params = _only(optimizer, block)
        if not params:
            return
        block.prefetch()
        part.step()
        self._stepped.setdefault(optimizer, []).extend(map(self._watch, params))
        if self._on_disk:
            block.keep_state(optimizer.state)

    # --- gradients between backward passes and steps ----------------------------------------------------------------

    def _watch(self, param: nn.Parameter) -> Watched:
        gradient = param.grad
        assert gradient is not None
        if type(gradient) is not Tensor:
            return Watched(param, gradient, gradient, (gradient._version, _place_of(param), param._version))
        watched = WatchedGradient.of(gradient, self._on_access)
        param.grad = watched
        return Watched(param, gradient, watched, (gradient._version, _place_of(param), param._version))

    def _on_access(self, writes: bool) -> None:
        if self.decision is None:
            self.decision = False
        if writes and self._stepped:
            raise RuntimeError(
                "Gradients are changed (clipped, for example) after the backward pass has updated the blocks with "
                f"them. {_REMEDY}"
            )

    def _forget_candidates(self) -> None:
        for each in self._candidates:
            _unwatch(each)
        self._candidates = []

    # --- step() -----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = bool(args[1:] or any(kwargs.values()))
        if has_closure and self.decision:
            raise RuntimeError(f"optimizer.step(closure) with blocks that step in the backward pass. {_REMEDY}")
        if optimizer in self._stepped:
            self._check(optimizer)
        elif self.decision is None:
            self.decision = self._may_step_in_backward(optimizer, has_closure)
        self._forget_candidates()
        if self._on_disk and optimizer not in self._stepped and not has_closure and self._treats_alone(optimizer):
            for block in self._blocks():  # one after the other is in memory
                self._step(optimizer, block)
                block.release()
        for each in self._stepped.get(optimizer, ()):
            each.param.grad = None  # the optimizer leaves it out

    def _check(self, optimizer: Optimizer) -> None:
        """Raise an error if something has changed that the steps of blocks depended on."""
        for what, has_changed in (
            ("Gradients were", any(each.has_new_gradient for each in self._stepped[optimizer])),
            ("The learning rate or another option of the optimizer was", self._has_other_options(optimizer)),
            ("Parameters were", any(each.has_changed for each in self._stepped[optimizer])),
        ):
            if has_changed:
                raise RuntimeError(
                    f"{what} changed between the backward pass, which has updated the blocks, and optimizer.step(). "
                    f"{_REMEDY}"
                )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = self._stepped.pop(optimizer, [])
        for each in stepped:
            each.param.grad = each.watched
            _unwatch(each)
        if self._on_disk:
            self._keep_state(optimizer, except_of={id(each.param) for each in stepped})
        self._num_backward = 0
        self.on_step()

    def _keep_state(self, optimizer: Optimizer, except_of: Iterable[int] = ()) -> None:
        for block in self._blocks():
            if not {id(param) for param in block.params}.intersection(except_of):
                block.keep_state(optimizer.state)
                block.release()

    def _treats_alone(self, optimizer: Optimizer) -> bool:
        return len(self._optimizers) == 1 and type(optimizer).__module__.startswith("torch.optim.")

    def _may_step_in_backward(self, optimizer: Optimizer, has_closure: bool) -> bool:
        return (
            self._treats_alone(optimizer)
            and self.accumulation_steps == 1
            and self._num_backward == 1
            and not has_closure
            and bool(self._candidates)
            and not any(each.has_new_gradient or each.has_changed for each in self._candidates)
            and not self._has_other_options(optimizer)
        )

    def _has_other_options(self, optimizer: Optimizer) -> bool:
        """Return whether options of groups have changed since the backward pass began; groups may have been added."""
        before = self._options.get(optimizer, [])
        return options_of(optimizer)[: len(before)] != before


def _place_of(param: Tensor) -> int:
    """Return where a parameter is in memory, 0 where it is nowhere."""
    return param.data_ptr() if type(param) is nn.Parameter else 0


def _unwatch(each: Watched) -> None:
    if isinstance(each.watched, WatchedGradient):
        each.watched.stop()
    if each.param.grad is each.watched:
        each.param.grad = each.gradient


def _only(optimizer: Optimizer, block: Block) -> tuple[Any, list[nn.Parameter]]:
    """Return an optimizer with the same state and settings that has the parameters of one block only, and those."""
    own = {id(param) for param in block.params if param.grad is not None}
    groups = [
        {**group, "params": [param for param in group["params"] if id(param) in own]}
        for group in optimizer.param_groups
    ]
    params = [param for group in groups for param in group["params"]]
    return part_of(optimizer, [group for group in groups if group["params"]]), params
