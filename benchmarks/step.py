"""One training step through a library and in bare PyTorch, on one process. Loading the batch is part of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from .contenders import bare, current
from .interleave import Comparison, compare, timed
from .task import ACCUMULATION, loader, model


def run(rounds: int) -> list[Comparison]:
    """Measure every kind of step."""
    torch.set_num_threads(1)
    library = current()

    def row(what: str, loop: Callable[[Any], Iterator[None]], target: float | None, who: Any = library) -> Comparison:
        return compare(what, lambda: timed(loop(bare)), lambda: timed(loop(who)), rounds=rounds, target=target)

    rows = [
        row("control: bare against bare, SGD", lambda who: steps(who, SGD), None, who=bare),
        row("step, SGD", lambda who: steps(who, SGD), 1.03),
        row("step, AdamW", lambda who: steps(who, AdamW), 1.03),
        row("step, AdamW, bf16", lambda who: steps(who, AdamW, "bf16"), 1.05),
        row(f"{ACCUMULATION} accumulating micro-batches, SGD", windows, 1.05),
    ]
    if "fp16" in library.PRECISIONS:
        rows.append(row("step, AdamW, fp16 and its loss scaler", lambda who: steps(who, AdamW, "fp16"), None))
    return rows


def steps(who: Any, make_optimizer: Callable[..., Optimizer], precision: str = "no") -> Iterator[None]:
    net = model()
    return who.steps(net, make_optimizer(net.parameters(), lr=1e-3), loader(), precision)  # type: ignore[no-any-return]


def windows(who: Any) -> Iterator[None]:
    net = model()
    return who.windows(net, SGD(net.parameters(), lr=1e-3), loader())  # type: ignore[no-any-return]
