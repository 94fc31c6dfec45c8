"""Let a script name devices that this machine does not have: a planned rank has one device, and everything is on it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .building import when_imported

_ABSENT = ("cuda", "xpu", "npu", "hpu", "mps", "mlu", "musa")
_MOVE_TO_DEVICE = {Tensor.cuda, Tensor.xpu}
_NOTHING = (
    "synchronize", "set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats", "set_per_process_memory_fraction",
)  # fmt: skip
_ZERO = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached",
)  # fmt: skip


def accept_absent_devices() -> None:
    """Map the names of accelerators to the device of this process, and answer questions about their memory."""
    AbsentDevices().__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
    for names, value in ((_NOTHING, None), (_ZERO, 0)):
        for name in names:
            if hasattr(torch.cuda, name):
                setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.memory_stats = lambda *args, **kwargs: {}
    torch.Generator = _Generator  # type: ignore[misc]
    when_imported("transformers.training_args", _compute_in_bf16)
    for kind in (torch.amp.autocast_mode.autocast, torch.amp.GradScaler):
        _map_first_argument(kind)


class AbsentDevices(TorchFunctionMode):
    """Call functions with the device of this process where they name another."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function on the device that there is."""
        kwargs = kwargs or {}
        if function in _MOVE_TO_DEVICE:
            return args[0]
        if "device" in kwargs:
            kwargs = kwargs | {"device": present(kwargs["device"], True)}
        if function is Tensor.to:
            args = (args[0], *(present(arg, index == 0) for index, arg in enumerate(args[1:])))
        return function(*args, **kwargs)


def present(device: Any, is_device: bool = False) -> Any:
    """Return the device of this process for one that is absent, and everything else as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in _ABSENT else device
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] in _ABSENT else device
    if is_device and isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _compute_in_bf16(library: ModuleType) -> None:
    """Make `TrainingArguments(bf16=True)` find a device that computes in bf16."""
    library.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, present(device, True))  # type: ignore[call-arg]


def _map_first_argument(kind: Any) -> None:
    plain_init = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        first = {name: present(value) for name, value in kwargs.items()}
        default = () if args or {"device", "device_type"} & kwargs.keys() else ("cpu",)
        plain_init(self, *default, *map(present, args), **first)

    kind.__init__ = init
