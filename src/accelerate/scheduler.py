"""A prepared scheduler: advances with the optimizer, once per process."""

from __future__ import annotations

import logging
from typing import Any

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
