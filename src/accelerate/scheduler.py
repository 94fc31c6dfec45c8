"""A prepared scheduler: advances with the optimizer, once per process as published."""

from __future__ import annotations

import logging
from typing import Any

from .runtime.gradient_state import GradientState
from .runtime.runtime import Runtime

_logger = logging.getLogger(__name__)
_told = False


class AcceleratedScheduler:
    """A learning-rate scheduler that follows the optimizer's real steps.

    It stands still while gradients accumulate and when the optimizer skipped its step. Unless batches are split, one
    step of N processes consumes N batches of the plain loop, so a schedule written for the plain loop advances N
    times per step; the first time that happens, a log line says so.
    """

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
            _tell_once(type(self.scheduler).__name__, times)
        for _ in range(times):
            if not self._is_at_its_end(times):
                self.scheduler.step(*args, **kwargs)

    def _is_at_its_end(self, times: int) -> bool:
        """Tell whether a schedule of fixed length has come to its last learning rate.

        Rounds that were filled up hold more batches than the plain loop, so advancing by whole rounds would run past
        the end, where a cosine rises again. One process may go there as the plain loop does, after its last step.
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
        """Hand on what only the wrapped scheduler knows."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _tell_once(name: str, times: int) -> None:
    global _told
    if not _told and Runtime.current().is_main_process:
        _logger.warning(
            "%s advances %d times per optimizer step, because each of the %d processes consumes a batch of its own and "
            "the schedule counts batches of the plain loop. If yours counts optimizer steps, pass "
            "Accelerator(step_scheduler_with_optimizer=False) or split_batches=True.",
            name,
            times,
            times,
        )
    _told = True
