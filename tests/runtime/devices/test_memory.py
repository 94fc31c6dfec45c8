"""Batch sizes that fit: what counts as out of memory, how sizes shrink, and what is given back between tries."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.devices.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)


def exhausted() -> RuntimeError:
    return RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    "exception",
    [
        exhausted(),
        torch.OutOfMemoryError("anything"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc 10485760 bytes"),
        MemoryError(),
    ],
)
def test_what_counts_as_out_of_memory(exception: Exception) -> None:
    assert should_reduce_batch_size(exception)


@pytest.mark.parametrize(
    "exception", [RuntimeError("shapes do not match"), ValueError("CUDA out of memory."), KeyError("x")]
)
def test_what_does_not(exception: Exception) -> None:
    assert not should_reduce_batch_size(exception)


def test_the_real_errors_of_this_machine_count() -> None:
    for allocate in (lambda: torch.empty(2**55, dtype=torch.uint8), lambda: np.empty(2**60, dtype=np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert should_reduce_batch_size(caught.value)


def test_sizes_shrink_by_a_tenth_until_one_fits() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, factor: int, *, more: int = 0) -> int:
        """Train."""
        tried.append(batch_size)
        if batch_size > 9:
            raise exhausted()
        return batch_size * factor + more

    assert train(2, more=1) == 19
    assert tried == [16, 14, 12, 10, 9]
    assert train.__doc__ == "Train."
    assert train(2) == 18, "a second call starts from the beginning"
    assert len(tried) == 10


def test_without_arguments_it_starts_from_128() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> int:
        return batch_size

    assert train() == 128


def test_the_next_size_can_be_the_callers_choice() -> None:
    sizes = iter([8, 4])
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 4:
            raise exhausted()
        return batch_size

    assert train() == 4
    assert tried == [100, 8, 4]


def test_a_function_that_never_fits_ends_with_the_reason() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise exhausted()

    with pytest.raises(RuntimeError, match=r"No executable batch size found, reached zero.*starting from 3") as failure:
        train()
    assert "2.00 GiB" in str(failure.value.__cause__)
    with pytest.raises(RuntimeError, match="starting from 0"):
        find_executable_batch_size(train, starting_batch_size=0)()


def test_other_errors_are_not_tried_again() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train()
    assert tried == [16]


def test_what_a_failed_try_held_is_free_before_the_next() -> None:
    held: list[weakref.ref[Any]] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        assert all(tensor() is None for tensor in held), "the tensors of the last try are still alive"
        activations = torch.ones(batch_size)
        held.append(weakref.ref(activations))
        if batch_size > 1:
            raise exhausted()
        return batch_size

    assert train() == 1
    assert len(held) == 4


def test_the_batch_size_may_not_be_given_by_hand() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str) -> None:
        raise AssertionError("not called")

    with pytest.raises(TypeError, match=r"into `train` as the first argument .*: call `train\(model="):
        train(4, "model")


def test_a_function_must_take_a_batch_size_and_may_take_any_number_of_others() -> None:
    with pytest.raises(TypeError, match=r"without\(\) must take the batch size as its first argument"):

        @find_executable_batch_size(starting_batch_size=4)
        def without() -> None:
            raise AssertionError("not called")

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, *models: str) -> tuple[int, tuple[str, ...]]:
        return batch_size, models

    assert train("a", "b", "c") == (4, ("a", "b", "c"))


def test_memory_is_released_object_by_object() -> None:
    class Big:
        def __init__(self) -> None:
            self.me = self  # a cycle, which only garbage collection ends

    a, b = Big(), Big()
    gone = [weakref.ref(a), weakref.ref(b)]
    a, b = release_memory(a, b)
    assert (a, b) == (None, None)
    clear_device_cache(garbage_collection=True)
    assert [reference() for reference in gone] == [None, None]
    assert release_memory() == []
