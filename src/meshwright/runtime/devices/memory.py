"""Find a batch size that fits, release memory, and tell its peak."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .device import clear_device_cache, is_cpu, is_xla

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "peak_memory",
    "release_memory",
    "should_reduce_batch_size",
]

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error for a convolution too large for the free memory
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS's for the workspace of its handle
    "Failed to CUDA calloc",  # NCCL's for the buffers of a communicator, in a DistBackendError
)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception means that memory ran out."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def release_memory(*objects: Any) -> list[Any]:
    """Release memory; return a None for every object, to be assigned to their names."""
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def arguments_without_batch_size(function: Callable[..., Any], decorator: str) -> Callable[[tuple[Any, ...]], None]:
    """Return what refuses arguments of a decorated function that hold the batch size, which the decorator passes."""
    parameters = inspect.signature(function).parameters
    takes_any_number = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if not parameters:
        raise TypeError(f"{function.__name__}() must take the batch size as its first argument.")

    def refuse(args: tuple[Any, ...]) -> None:
        if len(args) >= len(parameters) and not takes_any_number:
            rest = ", ".join(f"{name}={value!r}" for name, value in zip(list(parameters)[1:], args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{function.__name__}` as the first argument when called, but "
                f"{decorator} passes it: call `{function.__name__}({rest})`."
            )

    return refuse


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function of `batch_size` so that it is tried with smaller ones until memory suffices.

    Each try takes nine tenths of the last size, or what `reduce_batch_size_fn()` returns. Every process searches alone,
    and the global batch shrinks with the size: `Accelerator.fit_batch_size` keeps it, on all processes together.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    refuse_arguments = arguments_without_batch_size(function, "find_executable_batch_size")

    @functools.wraps(function)
    def with_fitting_batch_size(*args: Any, **kwargs: Any) -> Any:
        refuse_arguments(args)
        batch_size, last_error = starting_batch_size, None
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                last_error = error.with_traceback(None)  # its frames would keep the tensors of this try alive
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError(
            "No executable batch size found, reached zero: memory did not suffice even for one sample "
            f"(starting from {starting_batch_size})."
        ) from last_error

    return with_fitting_batch_size


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process had: allocated on an accelerator, or resident on a CPU; 0 if unknown."""
    if not is_cpu(device):
        with suppress(RuntimeError, AttributeError):  # an allocator of its own kind, or a torch without the function
            return 0 if is_xla(device) else int(torch.accelerator.max_memory_allocated(device))
        return 0
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
