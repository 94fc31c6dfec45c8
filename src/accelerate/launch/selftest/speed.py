"""Measure the speed that `accelerate test` reports. No speed is an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import Check
    from .script import Bench


def all_reduce_speed(bench: Bench) -> str:
    """Measure how fast 4 MiB are summed over all processes."""
    import torch
    import torch.distributed as dist

    if bench.world_size == 1:
        return "one process: nothing to send"
    numbers = torch.ones(2**20, device=bench.device)
    seconds = _median_seconds(lambda: dist.all_reduce(numbers), repeat=7)
    return f"4 MiB in {seconds * 1e3:.1f} ms: {numbers.nbytes / seconds / 1e6:,.0f} MB/s"


def matmul_speed(bench: Bench) -> str:
    """Measure how fast every process multiplies matrices, all at the same time."""
    import torch

    from ...runtime.collectives.operations import gather_object

    size = 512
    matrix = torch.ones(size, size, device=bench.device)
    bench.accelerator.wait_for_everyone()
    rate = 2 * size**3 / _median_seconds(lambda: matrix @ matrix, repeat=7) / 1e9
    rates = gather_object([rate])
    worst, best = min(rates), max(rates)
    each = f"{best:,.0f} GFLOP/s" if len(rates) == 1 else f"{worst:,.0f} to {best:,.0f} GFLOP/s per process"
    slowest = f", slowest rank {rates.index(worst)}" if best > 1.2 * worst else ""
    return f"float32 {size} x {size}: {each}{slowest}"


def _median_seconds(work: Callable[[], Any], repeat: int) -> float:
    import torch

    times: list[float] = []
    for _ in range(2 + repeat):  # two to warm up
        start = time.perf_counter()
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


MEASUREMENTS: dict[str, Check] = {"all-reduce": all_reduce_speed, "matmul": matmul_speed}
