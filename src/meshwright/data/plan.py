"""A printable summary of how a loader's data is sharded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Describe one epoch of a prepared loader: what every process gets, and what is padded or dropped."""

    samples: int | None
    num_processes: int
    global_batch: int
    steps: int | None
    drops_last: bool
    fills_last: bool
    mode: str

    @property
    def per_process_batch(self) -> int:
        """Return the number of samples per process and step."""
        return self.global_batch // self.num_processes

    @property
    def padding(self) -> int | None:
        """Return the number of repeated samples in the last step; metrics leave them out."""
        if self.samples is None or self.drops_last or not self.fills_last:
            return None if self.samples is None else 0
        return -self.samples % self.global_batch

    @property
    def dropped(self) -> int | None:
        """Return the number of samples that are dropped in an epoch."""
        if self.samples is None:
            return None
        return self.samples % self.global_batch if self.drops_last else 0

    def __str__(self) -> str:
        def known(number: int | None) -> str:
            return "not known before the end" if number is None else f"{number:,}"

        rows = {
            "samples": known(self.samples),
            "processes": f"{self.num_processes:,}",
            "global batch": f"{self.global_batch:,} = {self.num_processes:,} x {self.per_process_batch:,}",
            "steps per epoch": known(self.steps),
            "padding in the last step": known(self.padding),
            "dropped": known(self.dropped),
            "reading": self.mode,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
