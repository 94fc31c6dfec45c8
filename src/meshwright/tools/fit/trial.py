"""Run the first steps of a training function on this rank alone, and see whether memory suffices."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...accelerator.effects import dry_run
from ...data.loaders.base import PreparedLoader
from ...instruments import Instrument
from ...parallel.base import Bundle
from ...runtime import phases
from ...runtime.devices.device import is_cpu
from ...runtime.devices.memory import clear_device_cache, peak_memory, should_reduce_batch_size
from ...runtime.group.muting import collectives_muted
from .kept import Kept
from .models import facts_of_models

WINDOWS = 2
"""The second one has the memory of all later ones: gradients and the state of the optimizer are there."""
MICRO_BATCHES = 2
"""Of a window: the second one has the gradients of the first beside it, and further ones need no more."""
_MOST_BATCHES = 64
"""Of a function that closes no window, because it does not call `backward`, or because fp16 overflows."""

# [Note: trials]
# In a trial the function runs until two accumulation windows are closed, with collectives that involve no other rank
# (see [Note: muted collectives]). Then a private exception ends it, everything is put back, and the ranks exchange how
# it went. So a rank that runs out of memory leaves no other one waiting, in whatever collective or backward pass the
# others are, and a trial leaves no trace in the training that follows. Nothing is logged or saved by it. A trial has
# other values than the training (nobody else's gradients and shards), and the same shapes.


class _TrialEnded(BaseException):
    """End the function of a trial. No handler of the script for `Exception` stops it."""


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """How the trial of a batch size went on one rank."""

    fits: bool
    reason: str = ""
    """The first line of the error, if memory ran out."""
    peak: int | None = None
    """The largest number of bytes on the device; None where it is not counted."""
    error: str = ""
    """An error that is not about memory."""
    models: tuple[str, ...] = ()
    """What was prepared; see `facts_of_models`."""


class Trial(Instrument):
    """One batch size, tried on this rank. See [Note: trials]."""

    def __init__(self, accelerator: Any, kept: Kept, samples: int, accumulation_steps: int) -> None:
        self.accelerator = accelerator
        self.kept = kept
        self.samples = samples
        """Samples per process and micro-batch."""
        self.accumulation_steps = min(accumulation_steps, MICRO_BATCHES)
        self.accumulates = accumulation_steps > 1
        self.exception: Exception | None = None
        self._models: list[tuple[str, Any]] = []
        self._facts: list[str] = []
        self._batches = self._windows = 0
        self._has_gradients = False

    def run(self, function: Callable[[], Any]) -> TrialOutcome:
        """Run the function for a few steps; return how it went on this rank."""
        clear_device_cache(garbage_collection=True)
        _reset_peak()
        reason = ""
        with self._watching(), collectives_muted(self._groups_apart()):
            try:
                function()
            except _TrialEnded as ended:
                free_frames(ended)
            except Exception as error:
                if should_reduce_batch_size(error):
                    free_frames(error)
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                else:
                    self.exception = error
        device = self.accelerator.device
        peak = None if is_cpu(device) else peak_memory(device) or None
        self.kept.restore()
        if self.exception is None:
            self.exception = self._outlived()
        return TrialOutcome(
            fits=not reason,
            reason=reason,
            peak=peak,
            error="" if self.exception is None else f"{type(self.exception).__name__}: {self.exception}",
            models=tuple(self._facts),
        )

    def _groups_apart(self) -> list[Any]:
        """Return the group of checkpoints: what `resume()` reads has to be what it will read."""
        engine = self.accelerator.checkpointer._engine
        return [] if engine is None else [engine.group.process_group]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """See what the function does with the Accelerator, which neither logs nor saves meanwhile."""
        accelerator = self.accelerator
        steps, flags = accelerator.gradient_accumulation_steps, _synchronising(self.kept.models)
        replaced = {
            "prepare_data_loader": self._preparing_loader(accelerator.prepare_data_loader),
        }
        own = {name: value for name, value in vars(accelerator).items() if name in replaced}
        vars(accelerator).update(replaced)
        accelerator.gradient_accumulation_steps = self.accumulation_steps
        for replica in flags:
            replica.require_backward_grad_sync = False
        try:
            with accelerator.instruments.only(self), dry_run():
                yield
        finally:
            for name in replaced:
                del vars(accelerator)[name]
            vars(accelerator).update(own)
            accelerator.gradient_accumulation_steps = steps
            for replica in flags:
                replica.require_backward_grad_sync = True
            if phases.clock is not None:  # the function may have ended inside of a phase
                phases.clock.leave_all()

    def prepare_started(self, accelerator: Any, bundle: Bundle) -> None:
        """Note what the function trains."""
        self._facts += facts_of_models(bundle.models, bundle.optimizers)
        self._models += [(type(model).__name__, ref(model)) for model in bundle.models]

    def prepare_ended(self, accelerator: Any, bundle: Bundle) -> None:
        """Let DDP reduce nothing: its reducer waits for a result that a muted collective does not give."""
        for replica in _synchronising(bundle.models):  # its buckets are there already
            replica.require_backward_grad_sync = False

    def backward_started(self, accelerator: Any, loss: Tensor | None) -> None:
        """Note that a window has gradients."""
        self._has_gradients = True

    def _preparing_loader(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
            self.kept.keep_generators(data_loader)
            return plain(data_loader, *args, **kwargs)

        return prepare_data_loader

    def body_ended(self, loader: PreparedLoader) -> None:
        """Take note of a completed body of the training loop; end the function after enough of them."""
        if not loader.gradient_state.is_outermost(loader):
            return
        self._batches += 1
        accelerator = self.accelerator
        if self._has_gradients:
            self._check_loader(accelerator.gradient_state.active_dataloader)
            if self.accumulates and accelerator.window.step == 0 and not accelerator.gradient_state.end_of_dataloader:
                raise ValueError(
                    f"Rank {accelerator.process_index}: the global batch needs several micro-batches per step, and the "
                    "function does not use accelerator.accumulate(model): every micro-batch would be a step. Put "
                    "`with accelerator.accumulate(model):` around the body of the training loop."
                )
        if self._has_gradients and accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            self._windows += 1
            self._has_gradients = False
        if self._windows == WINDOWS or self._batches == _MOST_BATCHES:
            raise _TrialEnded

    def _check_loader(self, loader: Any) -> None:
        """Refuse to train on a loader whose batches are not of the size that is tried."""
        if loader is None or loader.data_makes_batches or loader.samples_per_read == self.samples:
            return
        when = "before the call" if loader in self.kept.loaders else "in the function"
        raise ValueError(
            f"Rank {self.accelerator.process_index}: the loader that the function trains on was prepared {when} and "
            f"has batches of {loader.samples_per_read} samples per process, while {self.samples} are tried. Make the "
            "loader in the function, with the batch size that it is given, and prepare it there."
        )

    def _outlived(self) -> Exception | None:
        """Return an error for a model that the try has trained and that is still there: nothing restores it."""
        older = {id(model) for model in self.kept.models}
        for name, model in self._models:
            if model() is not None and id(model()) not in older:
                return ValueError(
                    f"Rank {self.accelerator.process_index}: {name} was prepared in the function and outlives it, "
                    "because it is made or kept outside: a try would train it, and hold its memory. Make it in the "
                    "function, or prepare it with its optimizer before the call; it then gets its values back."
                )
        return None


def _synchronising(models: list[Any]) -> list[DistributedDataParallel]:
    plain = [getattr(model, "_orig_mod", model) for model in models]
    return [model for model in plain if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync]


def free_frames(error: BaseException) -> None:
    """Free what the frames of an error hold: the tensors of the try."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _reset_peak() -> None:
    with suppress(RuntimeError, AttributeError):  # no accelerator, or an allocator of its own kind
        torch.accelerator.reset_peak_memory_stats()
