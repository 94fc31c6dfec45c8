"""Note how far a script has come: when a step ends, and what was done if it ends before its second one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .....untrusted import build, read_json

_MOST_TURNS = 8
"""How often optimizers step before those that have not are no longer waited for."""


@dataclass
class LoaderPass:
    """What one pass over a loader has given to this rank."""

    samples: int | None
    """Samples of the data set, on all ranks together; None if it does not say."""
    batch_size: int = 0
    batches: int = 0


@dataclass
class Progress:
    """What a script has done."""

    models: int = 0
    """Models that it gave to `prepare`, and below optimizers."""
    optimizers: int = 0
    backward_passes: int = 0
    steps: int = 0
    loaders: list[LoaderPass] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write what was done."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_progress(path: Path) -> Progress:
    """Read what `Progress.save` wrote; a script that wrote nothing has done nothing."""
    if not path.exists():
        return Progress()
    return build(Progress, read_json(path, path.name), path.name)


class Turns:
    """Tell when every optimizer has stepped: networks that train against each other take turns in one step."""

    def __init__(self) -> None:
        self._expected: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self._stepped: set[int] = set()
        self._count = 0
        self._passes = 0

    def expect(self, optimizers: Iterable[Any]) -> None:
        """Wait for these optimizers too."""
        self._expected |= {id(optimizer) for optimizer in optimizers}

    def take(self, optimizer: Any, passes: int) -> int:
        """Note that an optimizer has stepped, after so many backward passes since the last step of the script.

        Returns the passes of each turn if the step of the script ends here, and 0 if it does not.
        """
        self._stepped.add(id(optimizer))
        if passes > self._passes:
            self._count, self._passes = self._count + 1, passes
        if self._count == _MOST_TURNS:
            self._expected &= self._stepped
        if not self._expected <= self._stepped:
            return 0
        of_each = max(1, passes // self._count)
        self._begin()
        return of_each
