"""Estimate the seconds of one operation on one device by its roofline."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.devices.catalogue import Device, format_of
from ..trace import UPDATE, Operation

MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER = "matmul", "attention", "elementwise", "optimizer"
KINDS = (MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER)

FLOPS, BANDWIDTH, LATENCY = "flops", "bandwidth", "latency"
BOUNDS = (FLOPS, BANDWIDTH, LATENCY)
"""What limits an operation: the device's arithmetic, its memory, or that it is too short to fill the device."""


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """The time of one operation on the device, and of the host that issues it."""

    kind: str
    bound: str
    seconds: float
    host_seconds: float


def estimate(operation: Operation, device: Device) -> TimeEstimate:
    """Estimate an operation: the longer one of arithmetic and memory traffic, and a gap before the next kernel."""
    kind = kind_of(operation)
    efficiency = device.efficiency
    size, host_us = float(operation.read_and_written), efficiency.host_us
    if operation.compiled and kind == ELEMENTWISE:
        size, host_us = size * efficiency.fusion, host_us * efficiency.fusion
    moving = size / (device.bandwidth * efficiency.memory)
    computing = flops_of(operation) / (device.peak(operation.dtype) * _share_of_peak(operation, kind, device))
    gap = efficiency.kernel_us * 1e-6
    bound = LATENCY if gap > computing + moving else FLOPS if computing > moving else BANDWIDTH
    return TimeEstimate(kind, bound, max(computing, moving) + gap, host_us * 1e-6)


def kind_of(operation: Operation) -> str:
    """Return the kind of an operation, one of KINDS."""
    if "attention" in operation.name:
        return ATTENTION
    if operation.flops:
        return MATMUL
    return OPTIMIZER if operation.phase == UPDATE else ELEMENTWISE


def flops_of(operation: Operation) -> float:
    """Return the FLOPs that a kernel computes: causal attention skips half of the scores."""
    return operation.flops / 2 if operation.causal else float(operation.flops)


def _share_of_peak(operation: Operation, kind: str, device: Device) -> float:
    efficiency = device.efficiency
    if kind == ATTENTION:
        return efficiency.attention
    share = efficiency.matmul_fp8 if format_of(operation.dtype) == "fp8" else efficiency.matmul
    for size in operation.shape:
        share *= size / (size + efficiency.half_size)
    return share
