"""Find the largest batch size that fits on every rank, with as many micro-batches per step as keep the global batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...program import program_name
from ...runtime.collectives.operations import broadcast_object_list, gather_object
from ...runtime.devices import device as devices
from ...runtime.devices.memory import should_reduce_batch_size
from .kept import Kept
from .models import facts_of_models
from .remembering import Entry, Remembered, default_path
from .trial import Trial, TrialOutcome, free_frames


class _Stale(BaseException):
    """End a training whose models are others than those that the remembered batch size was found for."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """A batch size that was tried, or remembered."""

    batch_size: int
    """Samples per process and micro-batch."""
    accumulation_steps: int
    fits: bool
    result: str
    """What happened, on which ranks."""


class BatchSizeSearch:
    """The sizes of one function, in the order in which they are tried. All ranks do the same."""

    def __init__(
        self,
        accelerator: Any,
        function: Callable[..., Any],
        starting_batch_size: int,
        global_batch_size: int | None,
        remember: bool | Path,
    ) -> None:
        self.accelerator = accelerator
        self.function = function
        self.per_process = samples_per_step(accelerator, starting_batch_size, global_batch_size)
        self.sizes = divisors(self.per_process, starting_batch_size)
        path = default_path() if remember is True else remember or None
        self.remembered = Remembered(path)
        self.tries: list[Try] = []
        self._entry = Entry(facts=self._facts(starting_batch_size))

    # --- the course -------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Find the size, then train with it; return what the function returns."""
        kept = Kept(self.accelerator)
        self._say(
            f"Global batch of {self.per_process * self._ranks} = batch size x accumulation steps x {self._ranks} "
            f"process{'es' if self._ranks > 1 else ''} that read{'' if self._ranks > 1 else 's'} data:"
        )
        call = partial(self._call, args, kwargs)
        recalled = self._recall()
        if recalled.batch_size in self._left(recalled):
            try:
                return self._train(recalled, call, kept, expected=recalled.models)
            except _Stale as stale:
                free_frames(stale)
                kept.restore()
                self._say(f"  the remembered size is not used: {stale}")
                recalled = self._entry
        return self._train(self._found(recalled, call, kept), call, kept)

    def _found(self, known: Entry, call: Callable[[int], Any], kept: Kept) -> Entry:
        """Try one size after the other, on all ranks; return an entry with the first that fits everywhere."""
        sizes = self._left(known)
        while sizes:
            size = sizes.pop(0)
            outcomes = self._try(size, call, kept)
            fits = all(outcome.fits for outcome in outcomes)
            if known.models and outcomes[0].models and outcomes[0].models != tuple(known.models):
                self._say(f"  sizes that were too large are tried again: {_changed(known.models, outcomes[0].models)}")
                known = self._entry if fits else self._entry.without(size)
                sizes = self._left(known)
            elif fits:
                found = replace(known, models=list(outcomes[0].models), batch_size=size)
                self._remember(found)
                return found
            else:
                known = known.without(size)
        raise RuntimeError(
            f"No executable batch size found: memory did not suffice for any of {self.sizes}, which keep the global "
            f"batch of {self.per_process * self._ranks}. See the lines above for the ranks; `{program_name()} plan` "
            "and the page on memory name what needs less."
        )

    def _try(self, size: int, call: Callable[[int], Any], kept: Kept) -> list[TrialOutcome]:
        """Try a size on every rank; raise on all of them if one failed for another reason than memory."""
        trial = Trial(self.accelerator, kept, size, self.per_process // size)
        mine = trial.run(lambda: call(size))
        outcomes: list[TrialOutcome] = gather_object([mine])
        if trial.exception is not None:
            raise trial.exception
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise RuntimeError(
                    f"Rank {self.accelerator.process_index} ends its search for a batch size, because rank {rank} "
                    f"failed in the try with {size}: {outcome.error}"
                )
        self._note(size, all(outcome.fits for outcome in outcomes), _result(outcomes))
        return outcomes

    def _train(
        self, entry: Entry, call: Callable[[int], Any], kept: Kept, expected: Sequence[str] | None = None
    ) -> Any:
        """Run the function with a size; where it turns out too large later, tell the next start, or try again here."""
        size = entry.batch_size
        assert size is not None
        if expected is not None:
            self._note(size, True, f"remembered from an earlier start ({self.remembered.path})")
        self.accelerator.gradient_accumulation_steps = self.per_process // size
        try:
            with self._expecting(expected):
                return call(size)
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
            entry = entry.without(size)
            is_stored = self.remembered.store(entry)
            self._say_here(
                f"Rank {self.accelerator.process_index} ran out of memory with batch size {size} after the first "
                f"steps. {'The next start' if is_stored else 'A start with a smaller size'} will not try it again."
            )
            if self.accelerator.num_processes > 1:  # the others are in the middle of a step
                raise
            free_frames(error)
        kept.restore()
        return self._train(self._found(entry, call, kept), call, kept)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
        accelerator = self.accelerator
        return self.function(size * self._ranks if accelerator.split_batches else size, *args, **kwargs)

    @contextmanager
    def _expecting(self, models: Sequence[str] | None) -> Iterator[None]:
        """Let `prepare` end the function if it gets other models than those that are remembered."""
        if models is None:
            yield
            return
        accelerator, left = self.accelerator, list(models)
        plain = accelerator._prepare_bundle

        def prepare_bundle(given: list[Any], optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
            facts = facts_of_models(given, optimizers)
            if facts != left[: len(facts)]:
                raise _Stale(_changed(left[: len(facts)], facts))
            del left[: len(facts)]
            return plain(given, optimizers, *args, **kwargs)

        accelerator._prepare_bundle = prepare_bundle
        try:
            yield
        finally:
            del accelerator._prepare_bundle

    # --- what is known ----------------------------------------------------------------------------------------------

    def _recall(self) -> Entry:
        """Return what the file of rank 0 says, and which sizes any rank knows as too large."""
        facts: dict[str, Any] = broadcast_object_list([dict(self._entry.facts)])[0]
        self._entry = Entry(facts=facts)
        mine = self.remembered.find(facts)
        found: list[Entry | None] = gather_object([mine])
        entry = found[0] or self._entry
        too_large = {size for each in found if each is not None for size in each.too_large}
        if found[0] is None and (differences := self.remembered.differences(facts)):
            self._say(f"  an earlier size is not used: {differences}")
        return replace(entry, too_large=sorted(too_large))

    def _left(self, entry: Entry) -> list[int]:
        smallest = min(entry.too_large, default=self.per_process + 1)
        return [size for size in self.sizes if size < smallest]

    def _remember(self, entry: Entry) -> None:
        if self.accelerator.is_main_process and self.remembered.store(entry):
            self._say(f"  remembered in {self.remembered.path}")

    def _facts(self, starting_batch_size: int) -> dict[str, Any]:
        accelerator = self.accelerator
        code = inspect.unwrap(self.function).__code__
        return {
            "function": f"{code.co_filename}:{self.function.__qualname__}",
            "device": _device_name(accelerator.device),
            "memory": devices.total_memory(accelerator.device),
            "processes": accelerator.num_processes,
            "spread": accelerator.strategy.asks_for,
            "offload": str(accelerator.settings.offload),
            "mixed_precision": accelerator.mixed_precision,
            "compiled_by": str(accelerator.settings.compilation.backend),
            "samples_per_step": self.per_process * self._ranks,
            "starting_batch_size": starting_batch_size,
            "torch": torch.__version__,
        }

    @property
    def _ranks(self) -> int:
        return int(self.accelerator.strategy.num_data_ranks)

    # --- what is said -----------------------------------------------------------------------------------------------

    def _note(self, size: int, fits: bool, result: str) -> None:
        steps = self.per_process // size
        self.tries.append(Try(batch_size=size, accumulation_steps=steps, fits=fits, result=result))
        self._say(f"  {size:>5} x {steps:<5} {result}")

    def _say(self, line: str) -> None:
        if self.accelerator.is_main_process:
            self._say_here(line)

    def _say_here(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def samples_per_step(accelerator: Any, starting_batch_size: int, global_batch_size: int | None) -> int:
    """Return how many samples a process contributes to a step; refuse what cannot be kept."""
    ranks, steps = accelerator.strategy.num_data_ranks, accelerator.gradient_accumulation_steps
    if starting_batch_size < 1:
        raise ValueError(f"fit_batch_size needs a starting batch size of at least 1, and got {starting_batch_size}.")
    if global_batch_size is None:
        return int(starting_batch_size * steps)
    if global_batch_size < 1 or global_batch_size % ranks:
        raise ValueError(
            f"A global batch of {global_batch_size} cannot be kept: {ranks} processes read samples of their own, and "
            f"it is no multiple of that. Use {max(ranks, global_batch_size // ranks * ranks)}, for example."
        )
    return int(global_batch_size // ranks)


def divisors(samples: int, largest: int) -> list[int]:
    """Return the batch sizes that make up a number of samples without a rest, the largest first."""
    return [size for size in range(min(samples, largest), 0, -1) if samples % size == 0]


def _changed(before: Sequence[str], now: Sequence[str]) -> str:
    return f"the function prepared {'; '.join(before) or 'nothing'}, and now {'; '.join(now) or 'nothing'}"


def _result(outcomes: Sequence[TrialOutcome]) -> str:
    """Say how a try went, on all ranks."""
    failed = [rank for rank, outcome in enumerate(outcomes) if not outcome.fits]
    if failed:
        ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
        return f"{ranks}: {outcomes[failed[0]].reason}"
    peaks = [outcome.peak for outcome in outcomes if outcome.peak is not None]
    return f"fits, peak {max(peaks) / 1e6:,.1f} MB" if peaks else "fits"


def _device_name(device: torch.device) -> str:
    return device.type if devices.is_cpu(device) else devices.names()[device.index or 0]
