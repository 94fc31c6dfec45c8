"""How late the device is, what it refuses, and which synchronisation is deliberately missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .build import extension
from .device_module import device_module
from .rules import RULES_VARIABLE, use_rules

DEFAULT_DELAYS = {"copy_bytes_per_second": 4e9, "copy_latency": 50e-6, "kernel_time": 50e-6}


def set_delays(
    *,
    copy_bytes_per_second: float = DEFAULT_DELAYS["copy_bytes_per_second"],
    copy_latency: float = DEFAULT_DELAYS["copy_latency"],
    kernel_time: float = DEFAULT_DELAYS["kernel_time"],
    jitter_seed: int = 0,
) -> None:
    """Set how long a copy and a kernel take on average, in seconds; single ones differ by chance."""
    extension().set_delays(copy_bytes_per_second, copy_latency, kernel_time, jitter_seed)


@contextmanager
def delays(**values: float) -> Iterator[None]:
    """Set delays inside the block."""
    before = extension().delays()
    set_delays(**values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        extension().set_delays(*before)


@contextmanager
def synchronization_removed() -> Iterator[None]:
    """Let streams not wait for each other inside the block: what relies on it must be seen to fail."""
    extension().set_waits_are_dropped(True)
    try:
        yield
    finally:
        extension().set_waits_are_dropped(False)


def let_failures_be_silent(silent: bool = True) -> None:
    """Let a collective whose peer is lost never complete, as NCCL's in one machine, instead of raising an error.

    It ends when its process group is aborted, or with the process.
    """
    extension().set_failures_are_silent(silent)


@contextmanager
def without_float64() -> Iterator[None]:
    """Let the device refuse float64 inside the block, as MPS does."""
    extension().refuse_float64(True)
    try:
        yield
    finally:
        extension().refuse_float64(False)


@contextmanager
def with_an_allocator_of_its_own_kind() -> Iterator[None]:
    """Let `torch.accelerator.empty_cache()` and the statistics beside it raise inside the block, as on MPS and NPUs."""
    extension().register_allocator(False)
    try:
        yield
    finally:
        extension().register_allocator(True)


@contextmanager
def without_memory_information() -> Iterator[None]:
    """Let the device's module not tell how much memory is free inside the block, as those of some devices."""
    device_module.mem_get_info = None  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del device_module.mem_get_info


@contextmanager
def moves_in_place() -> Iterator[None]:
    """Let parameters stay the same objects when their model moves, as on torch's own devices, inside the block.

    With devices that plug in from outside torch makes new parameters, and refuses `param.data = ...`.
    """
    extension().move_in_place(True)
    try:
        yield
    finally:
        extension().move_in_place(False)


@contextmanager
def kernels_when_called() -> Iterator[None]:
    """Let the host compute each kernel when it is called, inside the block; only the results are late."""
    extension().run_kernels_ahead(False)
    try:
        yield
    finally:
        extension().run_kernels_ahead(True)


def reset_faults() -> None:
    """Be as new."""
    extension().forget_errors()
    extension().forget_counts()
    extension().set_query_time(0.0)
    extension().set_queries_break_local_captures(False)
    extension().set_thread_is_relaxed(False)
    use_rules(os.environ.get(RULES_VARIABLE, ""))
    extension().set_waits_are_dropped(False)
    extension().set_failures_are_silent(False)
    extension().refuse_float64(False)
    extension().register_allocator(True)
    extension().run_kernels_ahead(True)
    extension().move_in_place(False)
    set_delays()
