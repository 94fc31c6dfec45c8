"""The meter of a run: samples, tokens and FLOPs per second, shares of the step, and the time left.

[Note: what the loop pays] The training thread adds up counts and seconds, once per batch. Everything else happens when
somebody asks: the loop that logs, a progress bar, or the watcher's thread, which tells the numbers of this rank to
rank 0 through the store, about once a second. Nothing waits for a device, and there is no collective.

[Note: which batches count] A batch is one of training if a backward pass or an optimizer's step begins before the next
batch of the same loop is requested. Other batches are evaluation: neither they nor their seconds count, also where the
loop over them is inside of the loop that trains. The first batch of training is left out of all rates, because
warming up takes time, and so does counting its FLOPs.

[Note: short steps] Reading the clock at every change of phase costs about ten microseconds per step. Where steps are
shorter than a few milliseconds and nobody else reads the clock, the phases of one step in 32 are measured, and the
seconds of the others together. All batches are counted. Without a clock a batch of training looks like one of
evaluation: where steps of the optimizer come less regularly than before, what was measured together is left out.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from ...instruments import Instrument, Instruments
from ...runtime import phases
from ...runtime.devices.memory import peak_memory
from ...runtime.phases import NAMES, PhaseClock, Row
from ...watch.stragglers.device_clock import clock_for
from .counting import BatchCounter, Count
from .flops import FlopCounter
from .reading import FIELDS, FLOPS, MEMORY, PEAK, RECOMPUTED, SAMPLES, SHARES, STEPS, TOKENS, Reading, Table, combined

_RECENT_SECONDS = 10.0
_SECONDS_BETWEEN_SAMPLES = 1.0
_MOST_SAMPLES = 4096
_MOST_STEPS = 8192
_STEPS_BETWEEN_COLLECTIONS = 16
_SHORT_STEP = 5e-3
_STEPS_TOGETHER = 31
"""Between two steps whose phases are measured; see [Note: short steps]."""
_BATCHES_TO_TRY = 3
"""Batches of a loop that may be the first of training: a loop without any is an evaluation."""

_Totals = tuple[int, float, float, float, float, int]
"""Batches, samples, tokens, elements, seconds and optimizer steps of training; replaced as a whole: threads read it."""


@dataclass(kw_only=True)
class Options:
    """How a meter counts: the arguments of `Accelerator.meter`."""

    tokens: Callable[[Any], int] | None = None
    steps: int | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    log_every: float = 10.0


@dataclass(frozen=True, kw_only=True)
class MeteredRun:
    """What a meter asks of the run: functions, because members may come and go."""

    device: torch.device
    world_size: Callable[[], int]
    share: Callable[[], float]
    """The part of this rank's samples that no other rank counts: less than 1 where several ranks read the same."""
    steps_taken: Callable[[], int]
    """Optimizer steps since the beginning of the run, also of those before a resume."""
    peak: Callable[[], float | None]
    """FLOP per second that the device reaches at most; None if that is not known."""


class _Sample(NamedTuple):
    time: float
    totals: _Totals
    done: float
    """Steps or batches of the run so far, in the unit of `Meter._end`."""
    phases: tuple[float, ...]


class _Loop:
    """A loop over a prepared loader."""

    def __init__(self, meter: Meter, loader: Any, tries: int, trained: int) -> None:
        self.counts: list[Count] = []
        """Of the batches that were read and are not added up."""
        self.loader = loader
        self.tries = tries
        """How many more batches may be the first of training, whose FLOPs are counted."""
        self.is_counting = False
        self.in_body = False
        self.trained = trained
        self.since_step = 0
        """Batches since a step ended."""
        self.until_short = True
        """Whether a short step is followed by steps that are measured together."""
        self.together = 0
        """How many more batches are measured together; see [Note: short steps]."""
        self.batches_per_step = 1
        self.steps = 0
        self._meter, self._start, self._claimed = meter, perf_counter(), meter._claimed

    def lap(self) -> float:
        """Return the seconds since the last call, without those of loops inside of this one: each claims its own."""
        now = perf_counter()
        own = max(0.0, now - self._start - (self._meter._claimed - self._claimed))
        self._meter._claimed = self._claimed = self._meter._claimed + own
        self._start = now
        return own


class Meter(Instrument):
    """Measure this process, and on the main process the run. See [Note: what the loop pays]."""

    def __init__(self, options: Options, place: MeteredRun, instruments: Instruments) -> None:
        self.options = options
        self._instruments = instruments
        self._loops: dict[int, _Loop] = {}
        """By the loader's id; of several loops over one loader the newest."""
        self.epochs: int | None = None
        """Epochs of the loop that trains, as far as `Accelerator.progress` was given them."""
        self._place = place
        self.count = BatchCounter(options.tokens)
        self._clock: PhaseClock | None = None
        self._own_clock: PhaseClock | None = None
        self._steps: deque[Row] = deque(maxlen=_MOST_STEPS)
        self._has_first_step = False
        """Whether the times of the first step of training were read, and left out."""
        self._phases = [0.0] * len(NAMES)
        self._totals: _Totals = (0, 0.0, 0.0, 0.0, 0.0, 0)
        self._claimed = 0.0
        """Seconds of all completed batches, of evaluation too; see `_Loop.lap`."""
        self._added_at: float | None = None
        self._loader: Callable[[], Any] = lambda: None
        self._flops: FlopCounter | None = None
        self._counted_since = (0.0, 0)
        """The elements of all batches before FLOPs were counted, and what showed that a batch was one of training."""
        self._per_element: tuple[float, float] | None = None
        """FLOPs per element of a batch, and those of recomputation."""
        self._peak: float | None = options.peak_flops
        self._samples: list[_Sample] = []
        self._others: list[Table] = []
        self._lock = threading.Lock()
        self._next_log = -math.inf
        self.running_clock()
        instruments.add(self)
        phases.meter = self

    @property
    def batches(self) -> int:
        """The batches of training so far, on this process."""
        return self._totals[0]

    # --- in the training thread -------------------------------------------------------------------------------------

    def running_clock(self) -> PhaseClock:
        """Return the clock of this process, and start one if nothing else has."""
        clock = phases.clock or self._own_clock
        if clock is None:
            clock = self._own_clock = clock_for(self._place.device)
        if phases.clock is None and clock.thread == threading.get_ident():
            phases.start(clock)
        if clock is not self._clock:
            self._clock, clock.copies = clock, self._steps
        return clock

    def epoch_started(self, loader: Any) -> None:
        """Begin to measure a loop. See [Note: which batches count]."""
        clock = self.running_clock()
        if threading.get_ident() != clock.thread:
            return
        if self._peak is None:
            self._peak = self._place.peak() or 0.0
        if self._flops is not None and clock.trained != self._counted_since[1]:
            self._end_counting(clock)  # an evaluation inside of the first batch of training
        clock.skip()  # what came before this loop
        self._loops[id(loader)] = _Loop(self, loader, self._tries(), clock.trained)

    def _tries(self) -> int:
        return _BATCHES_TO_TRY if self._per_element is None and self.options.flops_per_sample is None else 0

    def _loop_over(self, loader: Any) -> _Loop | None:
        loop = self._loops.get(id(loader))
        is_own = loop is None or self._clock is None or threading.get_ident() == self._clock.thread
        return loop if is_own else None

    def batch_read(self, loader: Any, batch: Any) -> None:
        """Count a batch before it is moved or divided: counting waits for no device."""
        loop = self._loop_over(loader)
        if loop is not None:
            loop.counts.append(self.count(batch, loader.partial_round))

    def body_started(self, loader: Any, batch: Any) -> None:
        """Count the FLOPs of what may be the first batch of training."""
        loop = self._loop_over(loader)
        if loop is None:
            return
        loop.in_body = True
        if loop.tries and not loop.together and self._clock is not None:
            loop.tries -= 1
            loop.is_counting = self._begin_counting(loop.counts[-1], self._clock)

    def body_ended(self, loader: Any) -> None:
        """Measure a batch."""
        loop = self._loop_over(loader)
        if loop is None or self._clock is None:
            return
        loop.in_body = False
        if not loop.together:
            self._end_batch(loop, self._clock)
            return
        loop.together -= 1
        if not loop.together:
            self._end_together(loop)
            if phases.clock is not None:  # it was not notified of this batch
                phases.clock.body_ended(loader)

    def epoch_ended(self, loader: Any, completed: bool) -> None:
        """Forget a loop; if it was left early, its last batch counts."""
        loop = self._loop_over(loader)
        if loop is None or self._clock is None:
            return
        del self._loops[id(loader)]
        if loop.together:
            self._end_together(loop)
        elif loop.in_body:
            self._end_batch(loop, self._clock, is_last=True)

    def _end_batch(self, loop: _Loop, clock: PhaseClock, *, is_last: bool = False) -> None:
        """Add a batch of training; measure the next steps together if this was a short one."""
        own = loop.lap()
        loop.since_step += 1
        if loop.is_counting:
            loop.is_counting = False
            self._end_counting(clock)
        if clock.trained != loop.trained:
            loop.trained = clock.trained
            self._add(loop, own)
        else:
            clock.forget()
            loop.counts.clear()
            loop.until_short = False
        is_short = loop.until_short and clock is self._own_clock and own < _SHORT_STEP and not is_last
        if is_short and clock.end_completed_step():
            loop.batches_per_step, loop.since_step = loop.since_step, 0
            loop.together = _STEPS_TOGETHER * loop.batches_per_step
            loop.steps = self._place.steps_taken()
            phases.stop(clock)

    def _end_together(self, loop: _Loop) -> None:
        """Add the batches of several short steps, if all of them had as many."""
        loop.together = 0
        if phases.meter is self:  # not stopped meanwhile
            self.running_clock()
        own = loop.lap()
        made = (self._place.steps_taken() - loop.steps) * loop.batches_per_step
        loop.until_short = made == len(loop.counts)
        if loop.until_short and loop.counts:
            self._add(loop, own)
        loop.counts.clear()
        if self._clock is not None:
            self._clock.forget()
            loop.trained = self._clock.trained
        loop.tries = self._tries()

    def _add(self, loop: _Loop, own: float) -> None:
        """Add the batches of training that a loop has counted, which took these seconds together."""
        batches, samples, tokens, work, seconds, _ = self._totals
        number, loader = len(loop.counts), loop.loader
        more = [sum(column) for column in zip(*loop.counts, strict=True)]
        loop.counts.clear()
        batches, steps = batches + number, self._place.steps_taken()
        self._totals = (batches, samples + more[0], tokens + more[1], work + more[2], seconds + own, steps)
        if self._loader() is not loader:
            self._loader = weakref.ref(loader)
        if not self._samples:
            self._sample(perf_counter())
            self._has_first_step = False
        elif batches % _STEPS_BETWEEN_COLLECTIONS < number and self._clock is self._own_clock is not None:
            self._own_clock.collect()  # a clock of the device keeps a few steps only

    def add(self, samples: float, tokens: float = 0.0) -> None:
        """Count what did not come from a prepared loader, on this process; call it once per step.

        Args:
            samples: The samples of the step.
            tokens: Their tokens.
        """
        now = perf_counter()
        own = 0.0 if self._added_at is None else now - self._added_at
        self._added_at = now
        batches, before, tokens_before, work, seconds, _ = self._totals
        steps = self._place.steps_taken()
        self._totals = (batches + 1, before + samples, tokens_before + tokens, work, seconds + own, steps)
        if not self._samples:
            self._sample(now)

    def _begin_counting(self, seen: Count, clock: PhaseClock) -> bool:
        """Count FLOPs from here on, if this may be the first batch of training; return whether."""
        if self._flops is not None or self._per_element is not None or not torch.is_grad_enabled():
            return False
        self._counted_since = (self.count.work - seen[2], clock.trained)
        self._flops = FlopCounter()
        self._flops.start()
        return True

    def _end_counting(self, clock: PhaseClock) -> None:
        """Stop counting FLOPs when the next batch is requested; without training in between, they do not count."""
        counter = self._flops
        if counter is not None and counter.stop():
            self._flops = None
            work, trained = self.count.work - self._counted_since[0], self._counted_since[1]
            if clock.trained != trained and work:
                self._per_element = (counter.flops / work, counter.recomputed / work)

    # --- whenever somebody asks -------------------------------------------------------------------------------------

    def read(self) -> Reading | None:
        """Return the throughput of the run over the last ten seconds; None before two batches of training.

        On the main process it is that of all ranks. Other ranks know their own numbers only, and take the others to be
        as fast.
        """
        with self._lock:
            row = self._row()
            if row is None:
                return None
            world_size = self._place.world_size()
            rows = [row, *self._others[1:world_size]]  # the own numbers are the newest
            return combined(rows, world_size, self._seconds_left())

    def due_values(self) -> dict[str, float]:
        """Return the metrics to add to what the loop logs now: none if they were added a few seconds ago."""
        now = perf_counter()
        if now < self._next_log:
            return {}
        reading = self.read()
        if reading is None:
            return {}
        self._next_log = now + self.options.log_every
        return reading.values()

    def row(self) -> bytes:
        """Return the numbers of this rank, for rank 0."""
        with self._lock:
            row = self._row()
        return (np.zeros(FIELDS) if row is None else row).astype("<f8").tobytes()

    def take(self, rows: Sequence[bytes]) -> None:
        """Take the numbers of all ranks."""
        table = [np.frombuffer(row, dtype="<f8") for row in rows]
        if all(row[SAMPLES] for row in table[1:]):  # else a rank has not made two steps yet
            self._others = table

    def stop(self) -> None:
        """Stop measuring."""
        self._instruments.remove(self)
        if phases.meter is self:
            phases.meter = None
        phases.stop(self._own_clock)

    def _sample(self, now: float) -> _Sample:
        """Return the present state, and keep it if the last one that was kept is old enough."""
        clock = self._own_clock
        if clock is not None and clock is self._clock and clock.thread == threading.get_ident():
            clock.collect()
        while self._steps:
            _, seconds = self._steps.popleft()
            if self._has_first_step:
                self._phases = [sum(pair) for pair in zip(self._phases, seconds, strict=True)]
            self._has_first_step = bool(self._samples)
        sample = _Sample(now, self._totals, self._end()[0], tuple(self._phases))
        if not self._samples or now - self._samples[-1].time >= _SECONDS_BETWEEN_SAMPLES:
            self._samples.append(sample)
            if len(self._samples) > _MOST_SAMPLES:
                del self._samples[1::2]
        return sample

    def _row(self) -> Table | None:
        if not self._samples:
            return None
        now = self._sample(perf_counter())
        before = self._before(now)
        batches, samples, tokens, work, seconds, steps = (
            new - old for new, old in zip(now.totals, before.totals, strict=True)
        )
        if not batches or seconds <= 0:
            return None
        share, row = self._place.share(), np.zeros(FIELDS)
        row[STEPS], row[SAMPLES], row[TOKENS] = steps, samples * share, tokens * share
        if self.options.flops_per_sample is not None:
            row[FLOPS] = self.options.flops_per_sample * samples * share
        elif self._per_element is not None:
            row[FLOPS], row[RECOMPUTED] = (each * work for each in self._per_element)
        row[: RECOMPUTED + 1] /= seconds
        row[PEAK], row[MEMORY] = self._peak or 0.0, peak_memory(self._place.device)
        spent = np.subtract(now.phases, before.phases)
        row[SHARES] = spent / spent.sum() if spent.sum() > 0 else 0.0
        return row

    def _before(self, now: _Sample) -> _Sample:
        """Return the sample with which the recent seconds begin: the last one that is old enough and has less."""
        for sample in reversed(self._samples):
            if now.time - sample.time >= _RECENT_SECONDS and sample.totals[0] < now.totals[0]:
                return sample
        return self._samples[0]

    def _seconds_left(self) -> float | None:
        """Return the time until the end, by the speed of the newer half of the run: it includes evaluations."""
        done, end = self._end()
        if end is None or not self._samples:
            return None
        if done >= end:
            return 0.0
        now, first = perf_counter(), self._samples[0].time
        half = min(
            bisect_left(self._samples, (first + now) / 2, key=lambda sample: sample.time), len(self._samples) - 1
        )
        for before in (self._samples[half], self._samples[0]):
            if done > before.done and now > before.time:
                return (end - done) * (now - before.time) / (done - before.done)
        return None

    def _end(self) -> tuple[float, float | None]:
        """Return how far the run is and where it ends: in optimizer steps if their number was given, else in batches.

        Without a number of steps or epochs, the end is that of the epoch.
        """
        if self.options.steps is not None:
            return self._place.steps_taken(), self.options.steps
        loader = self._loader()
        if loader is None:
            return 0.0, None
        position = position_of(loader)
        if position is None:
            return 0.0, None
        epochs, batch, length = position
        return epochs * length + batch, length * max(self.epochs or 0, epochs + (batch > 0))


def position_of(loader: Any) -> tuple[int, int, int] | None:
    """Return the epochs that a prepared loader has completed, the batches it has yielded since, and those of an epoch.

    None where the length is not known.
    """
    try:
        length = len(loader) + loader.skip_batches // loader.batches_per_round
    except (TypeError, NotImplementedError):
        return None
    rounds = -(-loader.cursor.batches // loader.batches_per_round) if loader.is_in_epoch else 0
    return loader.iteration, min(length, rounds), length
