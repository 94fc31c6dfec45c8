"""Who is measured: one module per contender, each with the same functions, and `bare` to hold them against.

    steps(net, optimizer, batches, precision)    train for ever; yield after every step
    windows(net, optimizer, batches)             accumulate for ever; yield after every window
    sharded_steps(net, make_optimizer, batches)  the same as `steps`, by FSDP2, one unit per block
    evaluation(net, batches)                     predict for ever; yield what was gathered from all processes
    prepared(batches)                            the loader that the library gives back
    saved_state(net, optimizer)                  a `SavedState`
    train_and_save(..., folder, batches)         train on the first batches and save
    resume(..., folder, batches)                 load, go to the next batch, train on it and return it
    launch(script, processes, folder)            the command that starts a script
    gather_alone(timeout)                        in a launched script, gather on rank 0 only
    IMPORT, CONSTRUCT, ANSWERS, PRECISIONS       how it begins, what its command answers to, what it computes in

All take plain torch objects and do what the library's own guide says to do with them. In a process group they train by
DDP. A contender leaves out what it does not have. accelerate 1.15 and ours share a module: their interface is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "BENCHMARKS_CONTENDER"
"""Which contender this process and those that it starts measure."""
MODULES = {"ours": "accelerate", "accelerate": "accelerate", "fabric": "fabric", "ray": "ray"}


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A model and an optimizer that trained one step, and how to save and load them."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    save_in_background: Callable[[Path], object] | None = None
    wait: Callable[[], object] = lambda: None
    """Wait for what is being saved in the background."""


def current() -> Any:
    """Return the contender that this process measures."""
    return import_module(f"{__name__}.{MODULES[os.environ.get(VARIABLE, 'ours')]}")
