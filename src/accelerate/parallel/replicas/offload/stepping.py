"""Update the parameters of a block as soon as its gradients are complete, where that changes nothing.

[Note: steps in the backward pass]
A block may step before the others if the optimizer treats every parameter alone, and if nobody changes or adds to the
gradients between the backward pass and `step()`: clipping, accumulation, or the script itself. This is not announced by
anyone, so the first step is only watched: it is made after the backward pass, and the versions of the gradients tell
whether they were changed. From then on blocks step on the thread that receives their gradients, and `step()` updates
the rest. If a later step is not like the first one, `step()` or `backward()` raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....errors import UnsupportedSettingError
from ...modules.memory.stepping import part_of
from .blocks import Block

_REMEDY = "Give OffloadConfig(step_in_backward=False)."

Versions = list[tuple[Tensor, Tensor, int]]
"""Parameters with their gradients, and the versions of these."""


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
        self._stepped: Versions = []
        self._watched: Versions = []
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

    # --- backward passes --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Refuse a second backward pass if the first one has updated blocks already."""
        if self._stepped:
            raise RuntimeError(
                "The blocks were updated in the last backward pass, and a second one began before optimizer.step(): "
                f"gradients of several passes are not added up. {_REMEDY}"
            )

    def end_backward(self) -> None:
        """Note the gradients, to see at the next step whether somebody changed them."""
        self._num_backward += 1
        if self.decision is None:
            self._watched = [each for block in self._blocks() for each in _versions(block)]

    def step(self, block: Block) -> None:
        """Update the parameters of a block, if blocks step in the backward pass."""
        if not self.decision:
            return
        for optimizer in self._optimizers:
            self._step(optimizer, block)

    def _step(self, optimizer: Optimizer, block: Block) -> None:
        block.prefetch()
        _only(optimizer, block).step()
        self._stepped += _versions(block)
        if self._on_disk:
            block.keep_state(optimizer.state)

    # --- step() -----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = bool(args[1:] or any(kwargs.values()))
        if self._stepped:
            if any(param.grad is not gradient or gradient._version != seen for param, gradient, seen in self._stepped):
                raise RuntimeError(
                    "Gradients were changed (clipped, for example) after the backward pass had updated the blocks with "
                    f"them. {_REMEDY}"
                )
        elif self.decision is None:
            self.decision = self._may_step_in_backward(optimizer, has_closure)
        if self._on_disk and not self._stepped and not has_closure and self._treats_parameters_alone(optimizer):
            for block in self._blocks():  # one after the other is in memory
                self._step(optimizer, block)
                block.release()
        for param, _gradient, _version in self._stepped:
            param.grad = None  # the optimizer leaves it out

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param, gradient, _version in self._stepped:
            param.grad = gradient
        if self._on_disk and not self._stepped:
            self._keep_state(optimizer)
        self._stepped.clear()
        self._watched.clear()
        self._num_backward = 0
        self.on_step()

    def _keep_state(self, optimizer: Optimizer) -> None:
        for block in self._blocks():
            block.keep_state(optimizer.state)
            block.release()

    def _treats_parameters_alone(self, optimizer: Optimizer) -> bool:
        return len(self._optimizers) == 1 and type(optimizer).__module__.startswith("torch.optim.")

    def _may_step_in_backward(self, optimizer: Optimizer, has_closure: bool) -> bool:
        return (
            self._treats_parameters_alone(optimizer)
            and self.accumulation_steps == 1
            and self._num_backward == 1
            and not has_closure
            and bool(self._watched)
            and all(param.grad is gradient and gradient._version == seen for param, gradient, seen in self._watched)
        )


def _versions(block: Block) -> Versions:
    return [(param, param.grad, param.grad._version) for param in block.params if param.grad is not None]


def _only(optimizer: Optimizer, block: Block) -> Any:
    """Return an optimizer with the same state and settings that has the parameters of one block only."""
    own = {id(param) for param in block.params}
    groups = [
        {**group, "params": [param for param in group["params"] if id(param) in own]}
        for group in optimizer.param_groups
    ]
    return part_of(optimizer, [group for group in groups if group["params"]])
