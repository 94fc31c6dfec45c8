"""`torch.gpu`, or another name: what torch and its users expect of a device's module, as `torch.cuda` has it."""

from __future__ import annotations

import os
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .build import extension

NAME = os.environ.get("SIMULATED_ACCELERATOR_NAME", "gpu")
NO_LIMIT = 64 << 30

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """Return the index that a device names: the current one where it names none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(extension().current_device()) if index is None else index


class DeviceModule(types.ModuleType):
    """The module that becomes `torch.gpu`."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}", "The simulated accelerator.")
        self.calls: Counter[str] = Counter()
        """How often each function that leaves no other trace was called."""

    # Devices

    def init(self) -> None: ...

    def _lazy_init(self) -> None: ...

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return bool(extension().in_bad_fork())

    def device_count(self) -> int:
        return int(extension().device_count())

    def get_device_name(self, device: Device = None) -> str:
        return "Simulated accelerator"

    def current_device(self) -> int:
        return int(extension().current_device())

    def set_device(self, device: Device) -> None:
        extension().set_device(index_of(device))

    def _exchange_device(self, index: int) -> int:
        before = self.current_device()
        if index >= 0:
            self.set_device(index)
        return before

    _maybe_exchange_device = _exchange_device

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        """Make a device the current one inside the block."""
        before = self._exchange_device(index_of(device))
        try:
            yield
        finally:
            self.set_device(before)

    def contexts(self) -> list[int]:
        """Return the devices that this process has opened a context on."""
        return [index for index in range(self.device_count()) if extension().has_context(index)]

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    # Streams

    def Stream(self, device: Device = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, index_of(device)), priority=priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        return torch.Event(torch.device(NAME), enable_timing=enable_timing, blocking=blocking)

    def synchronize(self, device: Device = None) -> None:
        self.calls["synchronize"] += 1
        torch.accelerator.synchronize(torch.device(NAME, index_of(device)))

    def current_stream(self, device: Device = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(NAME, index_of(device)))

    def default_stream(self, device: Device = None) -> torch.Stream:
        like = self.current_stream(device)
        return torch.Stream(stream_id=0, device_index=like.device_index, device_type=like.device_type)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """Make a stream the current one of its device, and that device the current one, inside the block."""
        if stream is None:
            yield
            return
        device_before = self.current_device()
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            self.set_device(device_before)

    # Captures

    @contextmanager
    def graph(self, capture_error_mode: str = "global") -> Iterator[None]:
        """Capture what this thread does inside the block, as `torch.cuda.graph`: see the note in `streams.h`."""
        self.synchronize()
        self.empty_cache()
        self.empty_host_cache()
        extension().begin_capture(capture_error_mode)
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                extension().end_capture()
            raise
        extension().end_capture()

    def is_current_stream_capturing(self) -> bool:
        return bool(extension().is_capturing())

    # Generators

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(extension().default_generator(index) for index in range(self.device_count()))

    def manual_seed(self, seed: int) -> None:
        extension().default_generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return int(extension().default_generator(self.current_device()).initial_seed())

    def get_rng_state(self, device: Device = None) -> Tensor:
        state: Tensor = extension().default_generator(index_of(device)).get_state()
        return state

    def set_rng_state(self, state: Tensor, device: Device = None) -> None:
        extension().default_generator(index_of(device)).set_state(state)

    # Memory

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1
        extension().empty_cache()

    def empty_host_cache(self) -> None:
        extension().empty_pinned_cache()

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        free, total = extension().memory_info(index_of(device))
        return free, total

    def memory_allocated(self, device: Device = None) -> int:
        return int(extension().memory_statistics(index_of(device))[0])

    def max_memory_allocated(self, device: Device = None) -> int:
        return int(extension().memory_statistics(index_of(device))[1])

    def memory_reserved(self, device: Device = None) -> int:
        return int(extension().memory_statistics(index_of(device))[2])

    def max_memory_reserved(self, device: Device = None) -> int:
        return int(extension().memory_statistics(index_of(device))[3])

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        extension().reset_peak_statistics(index_of(device))

    def memory_stats(self, device: Device = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(torch.device(NAME, index_of(device)))

    @contextmanager
    def memory_limit(self, num_bytes: int, device: Device = None) -> Iterator[None]:
        """Let a device have `num_bytes` of memory inside the block."""
        index = index_of(device)
        before = extension().memory_limit(index)
        extension().empty_cache()  # what is reserved and unused would count as free beyond the limit
        extension().set_memory_limit(index, num_bytes)
        try:
            yield
        finally:
            extension().set_memory_limit(index, before)


device_module = DeviceModule()
