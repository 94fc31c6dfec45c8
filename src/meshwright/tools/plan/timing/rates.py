"""Turn the seconds of a step into tokens per second and utilisation, with their interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ....runtime.devices.catalogue import DeviceCluster
from ..trace import Trace
from .step import Timing

MODEL_AXES = ("tp", "cp", "sp", "pp")
"""Axes whose ranks work on the same samples."""


@dataclass(frozen=True)
class Rates:
    """The speed of a run, of all ranks together. `low` and `high` are the bounds of `seconds`."""

    seconds: float
    low: float
    high: float
    samples_per_second: float
    tokens_per_second: float
    tokens_per_second_and_device: float
    mfu: float
    """FLOPs that the model needs over those that the devices could have computed, as a fraction."""


def rates(timing: Timing, trace: Trace, cluster: DeviceCluster, seconds: float | None = None) -> Rates:
    """Return the rates of a step that takes `seconds`, by default as long as its timing says."""
    seconds = timing.seconds if seconds is None else seconds
    loaders = loaders_of(trace)
    samples, tokens_of_step = trace.batches_of_step
    tokens = tokens_of_step * loaders / seconds if seconds else 0.0
    return Rates(
        seconds,
        low=seconds * cluster.interval.low,
        high=seconds * cluster.interval.high,
        samples_per_second=samples * loaders / seconds if seconds else 0.0,
        tokens_per_second=tokens,
        tokens_per_second_and_device=tokens / trace.world_size,
        mfu=utilisation(timing, cluster, seconds),
    )


def loaders_of(trace: Trace) -> int:
    """Return the number of ranks that read different samples."""
    return trace.world_size // prod(trace.axes.get(axis, 1) for axis in MODEL_AXES)


def utilisation(timing: Timing, cluster: DeviceCluster, seconds: float) -> float:
    """Return the model FLOPs utilisation of a rank.

    Model FLOPs are those of the products of matrices and of attention, as in 6 N + 12 L H Q T per token: attention in
    full, also if it is causal, and nothing twice. The peak is that of the format with the most FLOPs; products in 8
    bits are measured by the peak of 16 bits, as in published tables.
    """
    flops = timing.forward_flops
    if not flops or not seconds:
        return 0.0
    format_ = max(flops, key=lambda name: flops[name])
    return timing.model_flops / (seconds * cluster.device.peak("bf16" if format_ == "fp8" else format_))
