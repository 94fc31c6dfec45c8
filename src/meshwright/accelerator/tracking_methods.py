"""The methods of `Accelerator` that log to trackers and measure the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from .effects import effect
from .process_methods import ProcessMethods

if TYPE_CHECKING:
    from ..instruments import Instruments
    from ..runtime.loop.gradient_state import GradientState
    from ..runtime.loop.run_bar import RunBar
    from ..tools.meter.meter import Meter
    from ..tracking.general import BlankTracker
    from ..tracking.trackers import Trackers


def _blank_tracker(*_: Any, **__: Any) -> BlankTracker:
    from ..tracking.general import BlankTracker  # few runs need it

    return BlankTracker()


class TrackingMethods(ProcessMethods):
    """The part of `Accelerator` that opens trackers, logs to them, and measures the run."""

    gradient_state: GradientState
    instruments: Instruments
    _trackers: Trackers | None
    _meter: Meter | None = None
    _bar: RunBar | None = None
    _bar_of: Any = None
    """The loader whose progress the bar shows."""

    @property
    def log_with(self) -> list[Any]:
        """Return the names and objects of the requested trackers that can be used."""
        return [] if self._trackers is None else self._trackers.requested

    @property
    def trackers(self) -> list[Any]:
        """Return the tracker objects, once what was logged so far has reached them."""
        return [] if self._trackers is None else self._trackers.drained()

    @effect()
    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Open a run in every tracker of `log_with` and store its config, whatever that is made of.

        Args:
            project_name: Name of the project in every tracker.
            config: Settings of the run, which every tracker stores.
            init_kwargs: Options of each tracker by its name: `{"wandb": {"entity": "my_team"}}`.
            strict: Whether the error of a tracker that fails later is raised. By default it is reported, the tracker
                is left out, and training goes on.
        """
        if self._trackers is not None:
            self._trackers.begin(project_name, config, init_kwargs or {}, strict=strict)

    @effect(instead=_blank_tracker)
    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` its client's own object; other ranks get one that does nothing.

        Args:
            name: The tracker's name, such as "tensorboard".
            unwrap: Whether the client's own object is returned.
        """
        if self._trackers is None:
            raise ValueError(f"There is no tracker {name!r}: pass Accelerator(log_with={name!r}).")
        return self._trackers.named(name, unwrap)

    @effect()
    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        reduce: str | None = None,
    ) -> None:
        """Log values to every tracker, and go on before they are written.

        Args:
            values: Numbers, tensors of one element, or whatever else the trackers take, by name.
            step: Number of the step; without it the trackers count.
            log_kwargs: Options of each tracker's own log function, by the tracker's name.
            reduce: "mean", "sum", "max" or "min": the values of all processes become one first, and every process must
                call `log` with the same names. Without it the values of the main process are logged.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs or {}, reduce)
        for notify in self.instruments.logged:
            notify(self, values, step)

    def meter(
        self,
        *,
        tokens: Callable[[Any], int] | None = None,
        steps: int | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        log_every: float = 10.0,
    ) -> Meter:
        """Return what measures this run: `print(accelerator.meter().read())`. The first call starts it.

        It counts the batches of prepared loaders that are trained on. Call it on every process, before the loop;
        `Accelerator(meter=True)` does. With trackers, its numbers are added to what `log` logs.

        Args:
            tokens: Counts the tokens of a batch on this process, before it is moved to the device. By default they
                are those of `input_ids`, without padding where an `attention_mask` shows it.
            steps: Optimizer steps of the whole run, for the time left. By default that is the time until the end of
                the epoch, or of the epochs that `progress` was given.
            flops_per_sample: FLOPs of a sample, forward and backward. By default those of the first batch are counted,
                and later ones have as many for each element of their first tensor.
            peak_flops: FLOP per second that the device of a process reaches at most. By default known by the device's
                name, or measured on a CPU.
            log_every: Seconds between two additions to what `log` logs.

        Raises:
            ValueError: if it runs already, and is given other arguments.
        """
        from ..tools.meter.meter import Meter, MeteredRun, Options

        options = Options(
            tokens=tokens, steps=steps, flops_per_sample=flops_per_sample, peak_flops=peak_flops, log_every=log_every
        )
        if self._meter is None:
            place = MeteredRun(
                device=self.device,
                world_size=lambda: self.num_processes,
                share=self._share_of_samples,
                steps_taken=lambda: max((optimizer.steps_taken for optimizer in self._optimizers), default=0),
                peak=self._peak_flops,
            )
            self._meter = Meter(options, place, self.instruments)
            self.state._runtime.shutdown_hooks.append(self._meter.stop)
            if self._trackers is not None:
                self._trackers.extra_values = self._meter.due_values
        elif options not in (Options(), self._meter.options):
            raise ValueError(
                "accelerator.meter() was given arguments, but the meter runs already: give them in the first call, or "
                "as Accelerator(meter={...})."
            )
        return self._meter

    def progress(self, loader: Any, *, epochs: int | None = None) -> Iterator[Any]:
        """Iterate over a prepared loader, with one progress bar for the run, on the main process.

        It shows the speed, the utilization and the time left, as `meter` measures them; the meter starts if it does not
        run. In a terminal the bar is drawn by rich or tqdm, if one of them is installed, and what `print` prints stands
        above it. Where there is no terminal, a line is written to stderr from time to time. Call it on every process.

        Args:
            loader: A prepared loader. Another one gets no bar while there is one.
            epochs: Epochs of the run: the bar goes on through all of them. By default every epoch has its own.
        """
        meter = self.meter()
        if not self.is_main_process or (self._bar is not None and self._bar_of is not loader):
            yield from loader
            return
        from ..runtime.loop.run_bar import open_bar

        meter.epochs = epochs
        bar = self._bar = self._bar or open_bar()
        self._bar_of, completed, seen = loader, False, 0
        due = perf_counter() + min(bar.pause(), 1.0)
        try:
            for seen, batch in enumerate(loader, 1):
                yield batch
                if perf_counter() >= due:
                    self._show_progress(bar, loader, epochs, seen)
                    due = perf_counter() + bar.pause()
            completed = True
        finally:
            self._show_progress(bar, loader, epochs, seen, ended=completed)
            if not completed or epochs is None or loader.iteration >= epochs:
                bar.close()
                self._bar = self._bar_of = None

    def _show_progress(self, bar: RunBar, loader: Any, epochs: int | None, seen: int, ended: bool = False) -> None:
        """Update the bar: batches of the epoch, or of all epochs; of a stream, the `seen` ones of this epoch."""
        from ..tools.meter.meter import position_of

        position = position_of(loader)
        if position is None:
            epoch, done, total = getattr(loader, "iteration", 0) - ended, seen, seen if ended else None
        else:
            completed, batch, length = position
            is_over = batch == 0 and completed > 0  # the loop has just ended
            epoch = completed - is_over
            done = length if is_over else batch
            total = length if epochs is None else epochs * length
            done += 0 if epochs is None else epoch * length
        head = f"epoch {epoch + 1}" + ("" if epochs is None else f"/{epochs}")
        reading = self.meter().read()
        bar.update(head, done, total, "" if reading is None else reading.summary())

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per host, above a progress bar.

        Args:
            *args: As for Python's `print`.
            **kwargs: As for Python's `print`.
        """
        with nullcontext() if self._bar is None else self._bar.aside():
            super().print(*args, **kwargs)

    def _start_meter(self, wanted: bool | Mapping[str, Any]) -> None:
        """Start the meter if the argument of `Accelerator` enables it."""
        if wanted is not False:
            self.meter(**({} if wanted is True else wanted))

    def _share_of_samples(self) -> float:
        """Return the part of this rank's samples that is its own: ranks of a tensor-parallel group read the same."""
        member = self.state._runtime.member
        return self.strategy.num_data_ranks / self.num_processes if member is None else 1 / member.shards

    def _peak_flops(self) -> float | None:
        from ..runtime.devices.catalogue import peak_flops

        dtype = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}.get(self.mixed_precision)
        if dtype is None:
            params = (param.dtype for model in self._models for param in model.parameters())
            dtype = str(next((each for each in params if each.is_floating_point), torch.float32)).removeprefix("torch.")
        if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            dtype = "tf32"
        return peak_flops(self.device, dtype)
