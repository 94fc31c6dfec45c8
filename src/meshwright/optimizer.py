"""A prepared optimizer: steps at the end of an accumulation window only, in fp16 through the loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .config.combinations import Feature, require_combination
from .errors import UnsupportedSettingError
from .errors.callers import warn
from .parallel.base import StepTransaction, Strategy, move_optimizer_state, params_of
from .parallel.modules.memory.stepping import early_steps_of
from .runtime.collectives.nested import send_to_device
from .runtime.group.runtime import Runtime
from .runtime.loop.gradient_state import GradientState


def move_to_device(state: Any, device: torch.device) -> Any:
    """Move every tensor of an optimizer state to a device."""
    return send_to_device(state, device)


class AcceleratedOptimizer(Optimizer):
    """An optimizer that a plain training loop can step and zero on every micro-batch.

    While gradients accumulate, `step` and `zero_grad` do nothing. `step_was_skipped` tells whether the last `step` was
    skipped because an fp16 gradient overflowed.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self._step_was_skipped: bool | Tensor = False
        self._stepped = False
        self._steps_in_backward = hasattr(optimizer, "fused_backward")
        self.before_first_step: Callable[[Optimizer], None] | None = None
        self.refuse_use: Callable[[], NoReturn] | None = None
        """Raises while the optimizer must not be used, before anybody looks at its gradients."""
        self.before_step: Callable[[AcceleratedOptimizer], None] | None = None
        self.transaction: StepTransaction | None = None
        self.steps_taken = 0
        """Number of optimizer steps since the beginning of the run; saved in checkpoints."""
        if scaler is not None:
            optimizer.register_step_post_hook(self._on_step)
            if hasattr(scaler, "num_optimizers"):
                scaler.num_optimizers += 1
        if device_placement:
            move_optimizer_state(optimizer, Runtime.current().device)

    # The wrapped optimizer owns the state; Optimizer.__init__ is not called.

    @property
    def state(self) -> Any:
        """Return the per-parameter state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; torch puts it where the parameters are."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch a schedule-free optimizer to training."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are still accumulating."""
        if self.refuse_use is not None:
            self.refuse_use()
        if self.transaction.may_zero_grad() if self.transaction is not None else self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters, unless gradients are still accumulating."""
        if self.refuse_use is not None:
            self.refuse_use()
        if not self.gradient_state.sync_gradients or self._steps_in_backward:
            return None
        seen = self.gradient_state.instruments
        for notify in seen.step_started:
            notify(self)
        if self.before_first_step is not None:
            hook, self.before_first_step = self.before_first_step, None
            hook(self.optimizer)
        if self.before_step is not None:
            self.before_step(self)
        if self.transaction is not None and not self.transaction.may_step():
            self.steps_taken += 1
            return None
        if self.scaler is None:
            result: Any = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        else:
            result = self._scaled_step(self.scaler, closure)
        self.steps_taken += 1
        for notify in seen.step_ended:
            notify(self, self.step_was_skipped)
        return result

    def _scaled_step(self, scaler: torch.amp.GradScaler, closure: Callable[[], float] | None) -> Any:
        if not scaler.is_enabled():
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        # A fused optimizer decides inside its kernel, so only the scale shows it; others just do not step.
        decides_in_kernel = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        scale_before = scaler._scale.clone() if decides_in_kernel and scaler._scale is not None else None
        self._stepped = False
        result = scaler.step(self.optimizer, *(() if closure is None else (closure,)))
        scaler.update()
        # Read when somebody asks, because the host would wait for the device.
        if scale_before is None or scaler._scale is None:
            self._step_was_skipped = not self._stepped
        else:
            self._step_was_skipped = scaler._scale < scale_before
        return result

    def _on_step(self, *_: Any) -> None:
        self._stepped = True

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because of an overflow."""
        if isinstance(self._step_was_skipped, Tensor):
            self._step_was_skipped = bool(self._step_was_skipped)
        return self._step_was_skipped or getattr(self.optimizer, "step_was_skipped", False)

    def wraps(self, optimizer: Any) -> bool:
        """Return whether this wraps an optimizer, for a scheduler that was created with it."""
        return optimizer is self or optimizer is self.optimizer or optimizer is getattr(self.optimizer, "stepped", self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the wrapper's own attributes; `gradient_state` belongs to the process."""
        return {name: value for name, value in self.__dict__.items() if name != "gradient_state"} | {
            "before_first_step": None,
            "refuse_use": None,
            "before_step": None,
            "transaction": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        """Delegate to the wrapped optimizer."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def lomo_optimizers(optimizers: Iterable[AcceleratedOptimizer]) -> list[Any]:
    """Return the optimizers that step inside the backward pass, as LOMO and AdaLomo do; refuse if there is none."""
    found = [each.optimizer for each in optimizers if each._steps_in_backward]
    if not found:
        raise ValueError(
            "backward(learning_rate=...) is for LOMO optimizers, which step inside the backward pass, and none was "
            "given to prepare(): leave learning_rate out, prepare an optimizer of lomo_optim, or call "
            "step_in_backward(optimizer) of meshwright before prepare()."
        )
    return found


def refuse_beside_lomo(num_items: object, scaler: object, options: dict[str, Any]) -> None:
    """Refuse what an optimizer that steps inside the backward pass cannot honour."""
    others = {"num_items": num_items, "fp16's loss scaler": scaler}
    others |= {name: value for name, value in options.items() if name != "learning_rate"}
    for name, value in others.items():
        if value is not None:
            raise UnsupportedSettingError(
                f"backward(learning_rate=...) with {name}",
                "a LOMO optimizer steps inside the backward pass, by gradients that nobody sees before.",
                "Give it the mean loss alone, in bf16 or full precision.",
            )


def start_early_steps(optimizer: AcceleratedOptimizer, strategy: Strategy) -> None:
    """Let an optimizer that was given to `step_in_backward` do so; refuse where gradients are not complete then."""
    steps = early_steps_of(optimizer.optimizer)
    if steps is None:
        return
    state = optimizer.gradient_state
    in_use = {
        Feature.STEP_IN_BACKWARD: True,
        Feature.FP16: optimizer.scaler is not None,
        Feature.ACCUMULATION: state.num_steps > 1,
    }
    require_combination({feature: feature.value for feature, given in in_use.items() if given})
    for setting, given, reason in (
        ("Megatron-LM's gradient clipping", optimizer.before_step, "a norm needs all gradients at once."),
        ("this strategy", objection := strategy.objection_to_early_steps(params_of(optimizer)), objection or ""),
    ):
        if given:
            raise UnsupportedSettingError(f"step_in_backward with {setting}", reason, "Leave one out.")
    optimizer.before_first_step = None  # there are no gradients then
    steps.start(lambda: state.sync_gradients)


def take_learning_rate(optimizers: Iterable[AcceleratedOptimizer], options: dict[str, Any]) -> bool:
    """Give `learning_rate` of `backward()` to the optimizers of `step_in_backward`, if there are any."""
    found = [steps for each in optimizers if (steps := early_steps_of(each.optimizer)) is not None]
    if not found or any(each._steps_in_backward for each in optimizers):
        return False
    learning_rate = options.pop("learning_rate")
    for steps in found:
        steps.set_learning_rate(learning_rate)
    return True


def check_clipping(optimizers: Iterable[AcceleratedOptimizer], operation: str) -> None:
    """Refuse to clip gradients that the backward pass frees; LOMO's optimizers clip by arguments of their own."""
    for each in optimizers:
        if early_steps_of(each.optimizer) is not None:
            raise UnsupportedSettingError(
                f"{operation}() with step_in_backward",
                "the gradients are freed in the backward pass.",
                "Leave one out (max_grad_norm=0 in a Trainer).",
            )
        if each._steps_in_backward:
            warn(
                f"{operation}() clips nothing: {type(each.optimizer).__name__} steps inside the backward pass. "
                "Clip by its own arguments."
            )


def clip_gradients(
    optimizer: AcceleratedOptimizer, max_norm: float, clip: Callable[[list[Tensor], float, float], Tensor]
) -> None:
    """Clip the gradients of an optimizer by their norm, before it steps."""
    if optimizer.scaler is not None:
        optimizer.scaler.unscale_(optimizer.optimizer)
    clip(params_of(optimizer), max_norm, 2.0)


def refuse_offloaded_weights(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Refuse to train weights that a device map keeps on the host or on disk: gradients do not reach them."""
    mapped = [model for model in models if hasattr(model, "hf_device_map")]
    if not mapped:
        return
    updated = {id(param) for optimizer in optimizers for param in params_of(optimizer)}
    for model in mapped:
        offloaded = [name for name, param in model.named_parameters() if param.is_meta and id(param) in updated]
        if offloaded:
            raise ValueError(
                f"The optimizer is to train {len(offloaded)} weights that the model's device map keeps on the host or "
                f"on disk ({', '.join(offloaded[:3])}, ...), where gradients do not reach them. Load the model without "
                "offloading, shard it (FullyShardedDataParallelPlugin(cpu_offload=True)), or train adapters that are "
                "on a device and leave the rest out of the optimizer."
            )


def warn_of_foreign_optimizer(optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
    """Warn where the first step changes nothing although the prepared models have gradients."""
    own = params_of(optimizer)
    if not own or any(param.grad is not None for param in own):
        return
    if any(param.grad is not None for model in models for param in model.parameters()):
        warn(
            f"{type(optimizer).__name__} steps, but none of its {len(own)} parameters has a gradient, while the "
            "prepared model has gradients: the optimizer was made with the parameters of another model, or of a copy. "
            "Make it with model.parameters() of the model that is trained."
        )
