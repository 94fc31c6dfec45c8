"""Instruments see what a training loop does: a meter, a check, a clock, or a class of your own.

[Note: instruments] An instrument overrides the methods that it needs. They are called on the thread where the event
happens, in the order in which instruments were added: those of the Accelerator first, then those of the process. An
exception in an instrument propagates into the loop: swallowed on one rank, it would make the ranks differ in silence.
A method whose name ends in `_started` is followed by its `_ended` unless an exception comes in between.

An instrument observes. What changes a step is a part of the engine: see `StepTransaction` in `parallel/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .accelerator import Accelerator
    from .data.loaders.base import PreparedLoader
    from .optimizer import AcceleratedOptimizer
    from .parallel.base import Bundle


class Instrument:
    """Observe a training loop. Every method does nothing: override the ones you need.

    Pass objects of your class as `Accelerator(instruments=[...])`, or name the class in `meshwright launch
    --instruments package.module:Class` without a change of the script.
    """

    # --- once ---------------------------------------------------------------------------------------------------------

    def attached(self, accelerator: Accelerator) -> None:
        """Called when an Accelerator is complete, or when the instrument is added to it later."""

    def prepare_started(self, accelerator: Accelerator, bundle: Bundle) -> None:
        """Called with models and optimizers as the script made them."""

    def prepare_ended(self, accelerator: Accelerator, bundle: Bundle) -> None:
        """Called with the models and optimizers that will train."""

    def loader_prepared(self, accelerator: Accelerator, loader: PreparedLoader) -> None:
        """Called with each prepared loader."""

    # --- a loop over a prepared loader --------------------------------------------------------------------------------

    def epoch_started(self, loader: PreparedLoader) -> None:
        """Called when a loop over a loader begins, before its first batch is requested."""

    def batch_read(self, loader: PreparedLoader, batch: Any) -> None:
        """Called with a batch on the host, before it is moved to the device or divided."""

    def body_started(self, loader: PreparedLoader, batch: Any) -> None:
        """Called with a batch as the loop gets it, before the body of the loop runs."""

    def body_ended(self, loader: PreparedLoader) -> None:
        """Called when the body of the loop is complete, before the next batch is requested."""

    def epoch_ended(self, loader: PreparedLoader, completed: bool) -> None:
        """Called when the loop has ended; `completed` is False if it was left early."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def micro_batch_started(self, accelerator: Accelerator, models: tuple[nn.Module, ...]) -> None:
        """Called by `accumulate`, once `sync_gradients` says whether this micro-batch ends with a step."""

    def backward_started(self, accelerator: Accelerator, loss: Tensor | None) -> None:
        """Called before a backward pass; the loss is None where a pipeline computes it in the same pass."""

    def backward_ended(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Called after a backward pass, with the loss as the script passed it."""

    def clipped(self, accelerator: Accelerator, norm: Tensor) -> None:
        """Called after `clip_grad_norm_`, with the norm that the gradients had."""

    def step_started(self, optimizer: AcceleratedOptimizer) -> None:
        """Called before an optimizer steps; not for calls of `step` that only accumulate."""

    def step_ended(self, optimizer: AcceleratedOptimizer, skipped: bool) -> None:
        """Called after an optimizer has stepped, or was skipped because of an overflow."""

    # --- besides ------------------------------------------------------------------------------------------------------

    def phase_started(self, phase: int) -> None:
        """Called when a save or a wait for other ranks begins, on the thread that does it; of the process only."""

    def phase_ended(self, phase: int) -> None:
        """Called when it ends."""

    def saved(self, accelerator: Accelerator, path: str) -> None:
        """Called after `save_state`; with `wait=False` the files are still being written."""

    def loaded(self, accelerator: Accelerator, path: str) -> None:
        """Called after `load_state` or `resume` has restored a state."""

    def logged(self, accelerator: Accelerator, values: Mapping[str, Any], step: int | None) -> None:
        """Called with the values that the script logs."""

    def closed(self, accelerator: Accelerator) -> None:
        """Called by `end_training`, before trackers are closed."""


EVENTS = tuple(name for name in vars(Instrument) if not name.startswith("_"))
Calls = tuple[Callable[..., None], ...]


class Instruments:
    """The instruments of an Accelerator or of the process: for each event, the methods that override it."""

    __slots__ = ("__weakref__", "_accelerator", "_below", "_children", "_own", *EVENTS)

    attached: Calls
    prepare_started: Calls
    prepare_ended: Calls
    loader_prepared: Calls
    epoch_started: Calls
    batch_read: Calls
    body_started: Calls
    body_ended: Calls
    epoch_ended: Calls
    micro_batch_started: Calls
    backward_started: Calls
    backward_ended: Calls
    clipped: Calls
    step_started: Calls
    step_ended: Calls
    phase_started: Calls
    phase_ended: Calls
    saved: Calls
    loaded: Calls
    logged: Calls
    closed: Calls

    def __init__(self, below: Instruments | None = None) -> None:
        self._accelerator: Callable[[], Any] = lambda: None
        self._own: tuple[Instrument, ...] = ()
        self._below = below
        self._children: WeakSet[Instruments] = WeakSet()
        if below is not None:
            below._children.add(self)
        self._resolve()

    def add(self, *instruments: Instrument) -> None:
        """Call these from now on, after those that are there; one that is there stays in its place."""
        new = tuple(each for each in dict.fromkeys(instruments) if each not in self._own)
        for each in new:
            if not isinstance(each, Instrument):
                raise TypeError(f"instruments takes objects of classes derived from Instrument; this is none: {each!r}")
        self._own += new
        self._resolve()
        accelerator = self._accelerator()
        if accelerator is not None:
            for each in new:
                each.attached(accelerator)

    def remove(self, instrument: Instrument) -> None:
        """Call this one no more."""
        self._own = tuple(each for each in self._own if each is not instrument)
        self._resolve()

    @contextmanager
    def only(self, *instruments: Instrument) -> Iterator[None]:
        """Let nobody but these see the Accelerator meanwhile: what runs is a trial, and no part of the training."""
        own, below = self._own, self._below
        self._own, self._below = instruments, None
        self._resolve()
        try:
            yield
        finally:
            self._own, self._below = own, below
            self._resolve()

    def attach(self, accelerator: Accelerator) -> None:
        """Let `attached` be called for an Accelerator that is complete; those added later are called when added."""
        self._accelerator = ref(accelerator)
        for notify in self.attached:
            notify(accelerator)

    def __iter__(self) -> Iterator[Instrument]:
        yield from self._own
        yield from self._below or ()

    def __reduce__(self) -> Any:
        """Leave instruments out of a copied or pickled Accelerator: they belong to this process."""
        return _of_accelerator, ()

    @property
    def watch_loops(self) -> bool:
        """Whether a loop over a loader has an event that somebody overrides."""
        return bool(self.epoch_started or self.body_started or self.body_ended or self.epoch_ended)

    def _resolve(self) -> None:
        every = tuple(self)
        for name in EVENTS:
            plain = getattr(Instrument, name)
            calls = tuple(getattr(each, name) for each in every if getattr(type(each), name) is not plain)
            setattr(self, name, calls)
        for child in self._children:
            child._resolve()


PROCESS = Instruments()
"""The instruments of this process, which see all of its Accelerators."""


def _of_accelerator() -> Instruments:
    return Instruments(PROCESS)
