"""Stand in for `evaluate`, whose metrics are downloads: record what a script measures, and return numbers of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sitecustomize

__version__ = "0.4.6"


class Metric:
    """Take predictions as a metric of `evaluate` does."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def add_batch(self, predictions: Any = None, references: Any = None, **_options: Any) -> None:
        """Take the predictions of a batch."""
        self.batches.append((predictions, references))

    def compute(self, predictions: Any = None, references: Any = None, **_options: Any) -> dict[str, Any]:
        """Record all predictions since the last call; every measure is their number."""
        if predictions is not None:
            self.add_batch(predictions, references)
        values = [value for batch in self.batches for part in batch for value in part]
        sitecustomize.measured.append(f"{len(values)} {_digest(values)}")
        self.batches = []
        return defaultdict(float, accuracy=float(len(values)), score=float(len(values)))


def load(*_arguments: Any, **_options: Any) -> Metric:
    """Return a metric, whatever its name."""
    return Metric()


def combine(*_arguments: Any, **_options: Any) -> Metric:
    """Return one metric for several."""
    return Metric()


def _digest(values: list[Any]) -> str:
    return sitecustomize.digest(*(repr(value.tolist() if hasattr(value, "tolist") else value) for value in values))
