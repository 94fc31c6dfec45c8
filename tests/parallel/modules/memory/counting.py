"""The bytes of the storages that a function allocates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.tools.plan.counted import Counter


def peak_of(function: Callable[[], object]) -> int:
    """Return the most bytes that were alive at once, of those that the function touches or makes."""
    torch.autograd.set_multithreading_enabled(False)  # modes are of one thread
    try:
        with Counter() as counter:
            function()
    finally:
        torch.autograd.set_multithreading_enabled(True)
    return counter.peak
