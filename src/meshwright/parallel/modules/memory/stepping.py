"""Step the optimizer in the backward pass: each parameter as soon as its gradient is complete, which is then freed.

[Note: early steps]
A parameter may step before the others if the optimizer treats every parameter alone, and if nobody reads, changes or
adds to gradients between the backward pass and `step()`. What would do so is refused where it is set: clipping,
accumulation, loss scaling. `optimizer.step()` stays in the loop. It updates what has no early step, runs hooks, and
ends the step: a second gradient of one parameter before it is an error, and so is a learning rate that changed after
the backward pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ....errors import UnsupportedSettingError
from ....runtime.devices.device import has_streams
from ..dtensors import local

_ALONE = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.")
"""The modules of optimizers that treat every parameter alone. Others may count steps for a whole group."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_in_backward(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Let an optimizer step in the backward pass, from `prepare` on; return the optimizer.

    Each parameter steps as soon as its gradient is complete, and the gradient is freed at once. `optimizer.step()`
    stays in the loop, and ends the step. Results are bitwise equal. `backward(loss, learning_rate=...)` sets the
    learning rate of a step.

    Args:
        optimizer: An optimizer of torch, torchao or bitsandbytes. Call it before `prepare`.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith(_ALONE) or isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedSettingError(
            f"step_in_backward({kind.__name__})",
            "it is not known to treat every parameter alone.",
            "Use an optimizer of torch (except for LBFGS), torchao or bitsandbytes.",
        )
    optimizer.early_steps = EarlySteps(optimizer)  # type: ignore[attr-defined]
    return optimizer


def early_steps_of(optimizer: Optimizer) -> EarlySteps | None:
    """Return the early steps of an optimizer; None if it steps after the backward pass."""
    steps: EarlySteps | None = getattr(optimizer, "early_steps", None)
    return steps


class EarlySteps:
    """The steps of one optimizer's parameters in the backward pass. See [Note: early steps]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)  # which owns this object
        self._handles: list[Any] = []
        self._group_of: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._options: list[dict[str, Any]] = []
        self._closes_window: Callable[[], bool] = lambda: True

    def start(self, closes_window: Callable[[], bool]) -> None:
        """Step in backward passes from now on. `closes_window` tells whether gradients are complete after one."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._closes_window = closes_window
        for handle in self._handles:
            handle.remove()
        self._group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        me = ref(self)  # Python's garbage collector does not see the hooks of a tensor

        def on_gradient(param: Tensor) -> None:
            if (steps := me()) is not None:
                steps._step(param)

        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            *(
                hook_gradient(param, on_gradient, accumulated=True)
                for group in optimizer.param_groups
                for param in group["params"]
            ),
        ]

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next backward pass."""
        optimizer = self._optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def _step(self, param: Tensor) -> None:
        optimizer, gradient = self._optimizer(), param.grad
        if optimizer is None or gradient is None:
            return
        if not self._closes_window():
            raise UnsupportedSettingError(
                "step_in_backward with gradient accumulation",
                "gradients of several backward passes add up before a step.",
                "Leave one out.",
            )
        if id(param) in self._stepped:
            raise RuntimeError(
                "step_in_backward: a parameter got a second gradient before optimizer.step(), after it was updated by "
                "the first one. Call backward() and optimizer.step() once per step; recomputation has to be "
                "non-reentrant (use_reentrant=False)."
            )
        if not self._stepped:
            self._options = options_of(optimizer)
        group = optimizer.param_groups[self._group_of[id(param)]]
        part_of(optimizer, [{**group, "params": [param]}]).step()
        self._stepped.add(id(param))
        if has_streams(gradient.device):  # FSDP2 may allocate gradients in another stream than it completes them in
            local(gradient).record_stream(torch.accelerator.current_stream(gradient.device))
        param.grad = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepped and options_of(optimizer) != self._options:
            raise RuntimeError(
                "step_in_backward: the learning rate or another option of the optimizer changed after the backward "
                "pass, which had updated the parameters already. Change it before backward(), or after "
                "optimizer.step()."
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped.clear()


def hook_gradient(param: Tensor, hook: Callable[[Tensor], None], *, accumulated: bool) -> Any:
    """Call a hook with the gradient of a parameter, or with the parameter when its gradient is accumulated."""
    if not (param.is_floating_point() or param.is_complex()):
        return RemovableHandle({})  # integers have no gradients
    trains = param.requires_grad
    param.requires_grad_(True)  # a hook needs it, and frozen parameters may be trained later
    register: Any = param.register_post_accumulate_grad_hook if accumulated else param.register_hook
    handle = register(hook)
    param.requires_grad_(trains)
    return handle


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group in a form that can be compared later."""
    return [
        {
            name: (value.data_ptr(), value._version) if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, (int, float, str, tuple, Tensor))
        }
        for group in optimizer.param_groups
    ]


def part_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """Return an optimizer with the same state and settings that has these groups only, and none of the hooks."""
    part: Any = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop("step", None)  # a scheduler's, which counts the steps of the whole
    part._optimizer_step_pre_hooks = OrderedDict()
    part._optimizer_step_post_hooks = OrderedDict()
    part.param_groups = list(groups)
    return part
