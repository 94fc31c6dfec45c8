"""Run tests in worker processes that have the device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.ranks import WorkerPool, new_pool

from .build import compiled, why_not
from .registration import register, reset

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _processes_with_the_device() -> WorkerPool:
    return new_pool()


def _run_where_the_device_is(module: str, qualname: str, arguments: dict[str, Any], devices: int) -> Any:
    """Run a function, in a worker process: the device is there before anything else is imported."""
    register()
    reset(devices)
    function: Any = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    return getattr(function, "device_body", function)(**arguments)


def run_on_a_simulated_accelerator(
    function: Callable[..., Any],
    /,
    *,
    world_size: int = 1,
    time_limit: float = 200.0,
    in_new_processes: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Run a module-level function on every rank of a world that has the device; return what each rank returned.

    There are two devices, or as many as ranks. A failure in the process is the test's, with its traceback. What is
    returned must not name the device, which the caller's process does not know: return CPU tensors and strings.
    Processes are kept for the next call, unless `in_new_processes`, which have not used a device.
    """
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    compiled()  # here, because it may take longer than a world
    job = {
        "module": function.__module__,
        "qualname": function.__qualname__,
        "arguments": arguments,
        "devices": max(2, world_size),
    }
    pool = new_pool() if in_new_processes else _processes_with_the_device()
    found = pool.run(world_size, _run_where_the_device_is, job, time_limit=time_limit)
    if in_new_processes:
        pool.close()
    return found


def on_a_simulated_accelerator(body: F) -> F:
    """Run a test's body in a process that has the device. Fixtures it asks for must pickle."""

    @functools.wraps(body)
    def in_another_process(**fixtures: Any) -> None:
        run_on_a_simulated_accelerator(in_another_process, **fixtures)

    in_another_process.device_body = body  # type: ignore[attr-defined]
    return in_another_process  # type: ignore[return-value]
