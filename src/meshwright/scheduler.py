"""A prepared scheduler: advances with the optimizer, once per process."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .config.plugins.megatron import MegatronLMPlugin
from .errors.callers import warn
from .runtime.group.runtime import Runtime
from .runtime.loop.gradient_state import GradientState

_logger = logging.getLogger(__name__)
_has_logged = False
_SHARE_OF_PADDED_ROUNDS = 0.05
"""Fraction of steps after a schedule's end that are expected: padded rounds bring the end a little nearer."""


class AcceleratedScheduler:
    """A learning-rate scheduler that follows the optimizer's real steps.

    It does not advance while gradients accumulate or when the optimizer skipped its step. Unless batches are split, one
    step of N processes consumes N batches of the plain loop, so a schedule written for the plain loop advances N
    times per step. A schedule that was written for optimizer steps then ends too early, which is warned of.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        batches_per_step: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.batches_per_step = batches_per_step or Runtime.current().num_processes
        self.gradient_state = GradientState()
        self._early_end = _EarlyEnd()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule by what one optimizer step consumed."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        times = 1 if self.split_batches else self.batches_per_step
        if times > 1:
            _log_once(type(self.scheduler).__name__, times)
            rates = [group.get("lr") for optimizer in self.optimizers for group in optimizer.param_groups]
            self._early_end.observe(rates, self._is_finished(times), type(self.scheduler).__name__, times)
        for _ in range(times):
            if not self._is_finished(times):
                self.scheduler.step(*args, **kwargs)

    def _is_finished(self, times: int) -> bool:
        """Return whether a schedule of fixed length has reached its last learning rate.

        Padded rounds hold more batches than the plain loop, so advancing by whole rounds would run past the end, where
        a cosine rises again. A single process may go past it, as the plain loop does after its last step.
        """
        total_steps = getattr(self.scheduler, "total_steps", None)
        if total_steps is None:
            return False
        return bool(self.scheduler._step_count > (total_steps if times == 1 else total_steps - 1))

    def get_last_lr(self) -> Any:
        """Return the current learning rates."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """Compute the learning rates."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rates, where the scheduler can."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Delegate to the wrapped scheduler."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class _EarlyEnd:
    """Warn of a schedule that has ended while training continues."""

    def __init__(self) -> None:
        self._steps = 0
        self._steps_since_end = 0
        self._has_started = False  # a warm-up may start at zero
        self._has_warned = False

    def observe(self, rates: list[Any], is_finished: bool, name: str, times: int) -> None:
        """Record the learning rates of the last optimizer step; warn once."""
        if self._has_warned:
            return
        self._steps += 1
        # Tensors are not read: that would synchronize the device.
        is_zero = all(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
        self._has_started |= not is_zero
        self._steps_since_end = self._steps_since_end + 1 if is_finished or (is_zero and self._has_started) else 0
        if self._steps_since_end <= max(2, _SHARE_OF_PADDED_ROUNDS * self._steps):
            return
        self._has_warned = True
        if Runtime.current().is_main_process:
            warn(
                f"{name} came to its end {self._steps_since_end} optimizer steps ago, and training "
                f"goes on. It advances {times} times per optimizer step, because each of the {times} processes "
                "consumes a batch of its own and the schedule counts batches of the plain loop. If yours counts "
                f"optimizer steps, make it {times} times as long, or pass "
                "Accelerator(step_scheduler_with_optimizer=False) or split_batches=True."
            )


def _log_once(name: str, times: int) -> None:
    global _has_logged
    if not _has_logged and Runtime.current().is_main_process:
        _logger.info("%s advances %d times per optimizer step: once for the batch of each process.", name, times)
    _has_logged = True


class MegatronLMDummyScheduler(LambdaLR):
    """The schedule that Megatron-LM would make: a linear warm-up, then a decay to `min_lr`.

    Its form is that of the newest Accelerator's `MegatronLMPlugin`. Like every prepared schedule it counts batches of
    the plain loop.

    Args:
        optimizer: The optimizer.
        total_num_steps: Steps until the learning rate is `min_lr`.
        warmup_num_steps: Steps until the learning rate is that of the optimizer.
        **kwargs: Published, and without effect.
    """

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        plugin = _newest_plugin()
        if total_num_steps is None and (plugin.lr_decay_style != "constant" or plugin.lr_warmup_fraction):
            raise ValueError(
                f"MegatronLMDummyScheduler needs total_num_steps, the steps of its {plugin.lr_decay_style} decay."
            )
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        if plugin.lr_warmup_fraction:
            self.warmup_num_steps = round(plugin.lr_warmup_fraction * (total_num_steps or 0))
        self.kwargs = kwargs
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        lowest = [plugin.min_lr / rate if rate else 0.0 for rate in rates]
        super().__init__(optimizer, [partial(self._factor, plugin.lr_decay_style, low) for low in lowest])

    def _factor(self, style: str, lowest: float, step: int) -> float:
        """Return the part of the optimizer's own learning rate at a step."""
        if step < self.warmup_num_steps:
            return step / self.warmup_num_steps
        if style == "constant" or self.total_num_steps is None:
            return 1.0
        passed = (step - self.warmup_num_steps) / max(1, self.total_num_steps - self.warmup_num_steps)
        left = 1.0 - min(1.0, passed) if style == "linear" else 0.5 + 0.5 * math.cos(math.pi * min(1.0, passed))
        return lowest + (1.0 - lowest) * left


def _newest_plugin() -> MegatronLMPlugin:
    runtime = Runtime.existing()
    training = None if runtime is None else runtime.training
    plugin = None if training is None else training["megatron_lm_plugin"]
    return plugin if isinstance(plugin, MegatronLMPlugin) else MegatronLMPlugin()
