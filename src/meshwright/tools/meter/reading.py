"""What the meter says: the throughput of all ranks, as numbers, as metrics and in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...runtime.phases import NAMES

STEPS, SAMPLES, TOKENS, FLOPS, RECOMPUTED, PEAK, MEMORY = range(7)
"""Columns of what a rank tells the others: rates per second, FLOP/s of its device, bytes; then the phases' shares."""
SHARES = slice(7, 7 + len(NAMES))
FIELDS = 7 + len(NAMES)
Table = npt.NDArray[np.float64]
_PREFIX = "meter/"
_LEAST_SHOWN = 0.0005
"""The utilization that is not written as 0.0 %. Small models on a CPU have less, and it tells nothing."""


@dataclass(frozen=True)
class Reading:
    """The throughput of a run over all ranks, in the last seconds."""

    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float | None
    """None where nothing was counted: batches have no `input_ids`, and no `tokens` function was given."""
    flops_per_second: float | None
    """Of the model, without recomputation; None until the first step was counted."""
    recomputed_flops_per_second: float
    utilization: float | None
    """`flops_per_second` as a part of the peak of all devices; None where the peak of a device is not known."""
    memory_peak: int
    """Bytes on the rank that needed most so far: of the device, or of the process on a CPU."""
    shares: dict[str, float]
    """Parts of a step by phase, mean over ranks."""
    seconds_left: float | None
    """Until the last step, as far as it is known which one that is."""
    ranks: int
    """The ranks whose numbers these are; the others are taken to be as fast."""

    @property
    def ends_at(self) -> float | None:
        """When the last step will end, as `time.time()` counts."""
        return None if self.seconds_left is None else time.time() + self.seconds_left

    def values(self) -> dict[str, float]:
        """Return it as metrics for trackers; what is not known is left out."""
        known: dict[str, float | None] = {
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "tflops": None if self.flops_per_second is None else self.flops_per_second / 1e12,
            "recomputed_tflops": self.recomputed_flops_per_second / 1e12 or None,
            "utilization": self.utilization,
            "memory_peak_gib": self.memory_peak / 2**30,
            "seconds_left": self.seconds_left,
            "ends_at": self.ends_at,
            **{f"share/{phase}": share for phase, share in self.shares.items() if share},
        }
        return {_PREFIX + name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        parts = [self.speed()]
        if self.memory_peak:
            parts.append(f"peak {self.memory_peak / 2**30:.2f} GiB")
        used = {name: share for name, share in self.shares.items() if share >= 0.005}
        if used:
            parts.append(", ".join(f"{name} {share:.0%}" for name, share in used.items()))
        return " · ".join([*parts, *self._left()])

    def summary(self) -> str:
        """Return the rates and the time left in words, for a progress bar."""
        return " · ".join([self.speed(), *self._left()])

    def _left(self) -> list[str]:
        return [] if self.seconds_left is None else [f"{duration(self.seconds_left)} left, ends {self._end()}"]

    def speed(self) -> str:
        """Return the rates in words."""
        parts = [f"{short(self.samples_per_second)} samples/s"]
        if self.tokens_per_second is not None:
            parts.append(f"{short(self.tokens_per_second)} tokens/s")
        if self.flops_per_second is not None:
            shown = self.utilization is not None and self.utilization >= _LEAST_SHOWN
            share = f" ({self.utilization:.1%} of peak)" if shown else ""
            parts.append(f"{short(self.flops_per_second)}FLOP/s{share}")
        return " · ".join(parts)

    def _end(self) -> str:
        end = time.localtime(self.ends_at)
        return time.strftime("%H:%M" if (self.seconds_left or 0.0) < 12 * 3600 else "%a %d %b %H:%M", end)


def combined(rows: Sequence[Table], world_size: int, seconds_left: float | None) -> Reading:
    """Return the reading of a run from the rows of its ranks; those that are missing are taken to be as fast."""
    table = np.stack(rows)
    scale = world_size / len(rows)
    samples, tokens, flops, recomputed, peak = (
        float(table[:, column].sum()) * scale for column in (SAMPLES, TOKENS, FLOPS, RECOMPUTED, PEAK)
    )
    return Reading(
        steps_per_second=float(table[:, STEPS].mean()),
        samples_per_second=samples,
        tokens_per_second=tokens or None,
        flops_per_second=flops or None,
        recomputed_flops_per_second=recomputed,
        utilization=flops / peak if flops and table[:, PEAK].all() else None,
        memory_peak=int(table[:, MEMORY].max()),
        shares={name: float(share) for name, share in zip(NAMES, table[:, SHARES].mean(axis=0), strict=True)},
        seconds_left=seconds_left,
        ranks=len(rows),
    )


def short(number: float) -> str:
    """Write a number with three digits and the prefix of its magnitude: `12.3k`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or prefix == "P":
            break
        number /= 1000
    digits = 0 if number >= 99.95 or (number == int(number) and not prefix) else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{prefix}"


def duration(seconds: float) -> str:
    """Write a time span: `2:10:04`, `10:04` or `0:09`; days in words."""
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock
