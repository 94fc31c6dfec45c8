"""Device types, through `torch.accelerator`, and XLA: the only module that knows their names.

On a machine without an accelerator every call of `torch.accelerator` but the availability check raises, so
each function here checks availability first.
"""

from __future__ import annotations

import functools
import gc
import importlib
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...config import environment
from ...config.enums import DistributedType
from ...config.packages import depends_on, has_package
from ...errors.callers import warn
from . import machine, nvidia, xla

CPU = torch.device("cpu")

_DISTRIBUTED_TYPES = {
    "cpu": DistributedType.MULTI_CPU,
    "cuda": DistributedType.MULTI_GPU,
    "hpu": DistributedType.MULTI_HPU,
    "mlu": DistributedType.MULTI_MLU,
    "musa": DistributedType.MULTI_MUSA,
    "neuron": DistributedType.MULTI_NEURON,
    "npu": DistributedType.MULTI_NPU,
    "sdaa": DistributedType.MULTI_SDAA,
    "tpu": DistributedType.MULTI_GPU,  # torch_tpu; published is XLA alone, which means torch_xla
    "xla": DistributedType.XLA,
    "xpu": DistributedType.MULTI_XPU,
}
_PCI_VENDORS = {
    "cuda": nvidia.PCI_VENDOR,
    "hpu": "0x1da3",
    "mlu": "0xcabc",
    "npu": "0x19e5",
    "tpu": "0x1ae0",
    "xpu": "0x8086",
}
_AMD = "0x1002"
_ROUNDING_OF_PINNED = "pinned_max_round_threshold_mb"
_WITH_PINNED_ALLOCATOR = frozenset({"cuda", "xpu"})
_REDUCE_NO_FLOAT64 = frozenset({"npu"})  # HCCL, but on the newest of its devices within a machine

# [Note: a device for each process]
# Local rank r takes device r. Slurm (--gpus-per-task) and many wrapper scripts restrict each process to devices of its
# own instead, and then every process numbers them from 0. A local rank beyond the visible devices can therefore mean
# two things: it has devices of its own, or more processes than devices were started. It has its own if Slurm started it
# and says so, or if it sees one device and a variable restricts it to that one; then it takes device 0. (A variable
# that is the same for all processes makes them share a device, which NCCL refuses at the first collective.) Otherwise
# it is an error. Google's torch_tpu binds each process to a chip before torch is asked, and no process can change that.


# [Note: surviving]
# NCCL's watchdog ends the process after the loss of another one, unless a variable disables that. It is read when a
# group is opened. The watchdog also requests a dump, after which the process ends in any mode, and sleeps four times as
# long as dumps may take, while the end of the group waits for it. An abort during a call is documented for non-blocking
# communicators only, and nothing else bounds the time that connecting takes.

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SURVIVING = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
}


def accelerator_type() -> str | None:
    """Return the kind of accelerator that this machine has, or None."""
    if xla.is_used():  # first, as published: torch_xla may drive GPUs too
        return "xla"
    _import_gaudi()
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None else None


@functools.cache
def _import_gaudi() -> None:
    """Import the package that adds Gaudi to torch, where both are here.

    torch imports the packages of other devices itself, by their entry points (`torch.backends`).
    """
    is_there = not hasattr(torch, "hpu") and machine.has_device_files("accel/accel[0-9]*", "accel[0-9]*", "hl[0-9]*")
    if is_there and has_package("habana_frameworks.torch"):
        importlib.import_module("habana_frameworks.torch")


def has_accelerator(kind: str) -> bool:
    """Return whether this machine has accelerators of a kind."""
    return accelerator_type() == kind


def count() -> int:
    """Return the number of accelerators that this process sees."""
    kind = accelerator_type()
    return 0 if kind is None else (xla if kind == "xla" else torch.accelerator).device_count()


def names() -> list[str]:
    """Return the names of the accelerators that this process sees; the kind where torch has no name for them (MPS)."""
    kind = accelerator_type()
    if kind is None:
        return []
    name_of = getattr(device_module(torch.device(kind)), "get_device_name", None)
    return [kind if name_of is None else str(name_of(index)) for index in range(count())]


def pci_vendor() -> str | None:
    """Return the PCI vendor of this machine's accelerators; None where they are on no PCI bus, or not known."""
    kind = accelerator_type()
    return _AMD if kind == "cuda" and torch.version.hip is not None else _PCI_VENDORS.get(kind or "")


def default_device() -> torch.device:
    """Return the accelerator where there is one, else the CPU."""
    return torch.device(accelerator_type() or "cpu")


def device_for(
    *, local_rank: int, world_size: int, cpu: bool, requested: str | None, launcher: str | None = None
) -> torch.device:
    """Choose the device of a process: one accelerator each, by local rank. See [Note: a device for each process].

    A single process gets the device without an index, as published ("cuda", not "cuda:0").
    """
    if requested is not None:
        return torch.device(requested)
    kind = accelerator_type()
    if cpu or kind is None:
        return CPU
    if kind == "xla":
        return xla.default_device()
    if world_size == 1:
        return torch.device(kind)
    if kind == "tpu" and _is_googles():
        return torch.device(kind, torch.accelerator.current_device_index())
    visible = torch.accelerator.device_count()
    if local_rank < visible:
        return torch.device(kind, local_rank)
    if _has_own_devices(kind, visible, launcher):
        return torch.device(kind, 0)
    variable = environment.VISIBLE_DEVICES.get(kind, ("the variable of visible devices",))[0]
    raise RuntimeError(
        f"Local rank {local_rank} on host {socket.gethostname()} has no device: {visible} {kind} device(s) are "
        f"visible and each process needs its own. Start at most {visible} processes on this host, or pass cpu=True. "
        "Or, if each process was meant to have a device of its own, let each of them see that one only: set "
        f"{variable}, as Slurm does with --gpus-per-task=1."
    )


@functools.cache
def _is_googles() -> bool:
    """Return whether the device "tpu" is that of Google's torch_tpu; Sophgo's package has the same name."""
    return depends_on("torch_tpu", "libtpu")


def launch_variables(machines: int, processes: int) -> dict[str, str]:
    """Return the variables about all devices that the processes of a launch need: the topology of Google's TPUs.

    Args:
        machines: The number of machines.
        processes: Processes on each of them, one per chip.
    """
    if accelerator_type() != "tpu" or not _is_googles():
        return {}
    try:
        torch.tpu.distributed.set_tpu_launch_env(nnodes=machines, nproc_per_node=processes)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise ValueError(f"torch_tpu cannot run {processes} processes on the chips of this machine: {error}") from error
    found = {name: environment.read(name) for name in environment.TPU_LAUNCH_VARIABLES}
    return {name: value for name, value in found.items() if value is not None}


def _has_own_devices(kind: str, visible: int, launcher: str | None) -> bool:
    """Return whether the devices that this process sees are for no other process of its host."""
    if launcher == "Slurm" and environment.read(environment.SLURM_GPUS_PER_TASK):
        return visible > 0
    restricted_to = environment.read_visible_devices(kind)
    return visible == 1 and restricted_to is not None and len(restricted_to) == 1


def activate(device: torch.device) -> None:
    """Make a device the current one of its kind."""
    if device.type not in ("cpu", "xla") and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device runs on streams, beside the host, and copies from pinned memory do."""
    return device.type not in ("cpu", "mps", "meta", "xla")


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread captures a graph on the current stream of a device."""
    asks = getattr(device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def number_on(device: torch.device, number: float | torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor of a device, which the host does not wait for.

    A number of the host would be copied from memory that is not pinned. XLA takes it as data: a constant would be
    compiled again for each value.
    """
    if isinstance(number, torch.Tensor):
        return number.to(device, non_blocking=not (is_cpu(number.device) and number.is_pinned()))  # it may be changed
    if has_streams(device):
        return torch.full((), number, device=device)
    return torch.as_tensor(number, device=device)


_side_streams: dict[tuple[str, int], torch.Stream] = {}


def side_stream(device: torch.device) -> torch.Stream:
    """Return the stream of a device for copies beside its computation: one per process.

    Torch has 32 of them per device, which all libraries share, and freed memory is reused by its own stream only.
    """
    place = device.type, torch.accelerator.current_device_index() if device.index is None else device.index
    if place not in _side_streams:
        _side_streams[place] = torch.Stream(torch.device(*place))
    return _side_streams[place]


def moves_in_place(device: torch.device) -> bool:
    """Return whether a tensor of the host can become one of the device by `tensor.data = ...`.

    torch allows it for its own devices. A model that moves to one that plugs in from outside gets new parameters.
    """
    host = torch.empty(0)
    return torch._has_compatible_shallow_copy_type(host, host.to(device))


def is_cpu(device: torch.device) -> bool:
    """Return whether this device is the CPU."""
    return device.type == "cpu"


def is_xla(device: torch.device) -> bool:
    """Return whether this is a device of XLA, whose tensors have no address and whose operations are recorded."""
    return device.type == "xla"


@functools.cache
def finest_float(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that a device supports: MPS and some XPUs have no float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def finest_reduced_float(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point dtype that collectives sum on a device."""
    return torch.float32 if device.type in _REDUCE_NO_FLOAT64 else finest_float(device)


def distributed_type_of(device: torch.device) -> DistributedType:
    """Return the published name of data parallelism on this kind of device."""
    return _DISTRIBUTED_TYPES.get(device.type, DistributedType.MULTI_GPU)


def collective_backend(device: torch.device, requested: str | None) -> str:
    """Choose the backend for a device, keeping gloo beside it for tensors on the CPU.

    "nccl" is the published default of `InitProcessGroupKwargs` and means no choice where there is no CUDA.
    """
    if device.type == "cpu":
        return "gloo" if requested in (None, "nccl") else str(requested)
    if requested is None or (requested == "nccl" and device.type != "cuda"):
        requested = _default_backend(device)
    if ":" in requested:
        return requested
    return f"cpu:gloo,{device.type}:{requested}"


def default_timeout(backend: str) -> timedelta | None:
    """Return NCCL's own timeout for a group that has gloo beside it; torch would take gloo's, which is longer."""
    if not backend.endswith(":nccl"):
        return None
    timeout: timedelta | None = getattr(dist.distributed_c10d, "default_pg_nccl_timeout", None)
    return timeout


def prepare_collectives(device: torch.device) -> None:
    """Set what NCCL must know of this machine before its first communicator, where the launcher has not."""
    names = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if environment.read(name) is None]
    fault = nvidia.p2p_fault() if names and not is_cpu(device) else None
    if fault is not None:
        environment.export(dict.fromkeys(names, "1"))


def prepare_to_survive() -> None:
    """Set what backends must know before the first group of a run whose members are lost. See [Note: surviving]."""
    mode = environment.read(_ERROR_HANDLING)
    if mode not in (None, "0", "1", "2"):  # torchelastic sets 1 wherever nobody has chosen
        warn(f"{_ERROR_HANDLING}={mode} lets NCCL end processes when another one is lost: --survive sets it to 0.")
    chosen = {name: value for name, value in _SURVIVING.items() if environment.read(name) is None}
    environment.export(chosen | ({} if mode == "2" else {_ERROR_HANDLING: "0"}))


def _default_backend(device: torch.device) -> str:
    if device.type == "xla":
        return xla.collective_backend()
    is_xccl_available = getattr(dist, "is_xccl_available", bool)  # bool() is False: an older torch
    if device.type == "xpu" and not is_xccl_available():
        warn(
            "This torch was built without xccl, so the process group of the XPUs uses gloo, which carries tensors on "
            "the CPU only. Install a torch that was built with xccl to train on several XPUs."
        )
        return "gloo"
    return dist.get_default_backend_for_device(device)


def ddp_device_ids(device: torch.device) -> list[torch.device] | None:
    """Return the `device_ids` argument of DDP: None on the CPU."""
    return None if device.type == "cpu" else [device]


def device_module(device: torch.device) -> Any:
    """Return torch's module for this kind of device (`torch.cuda`, ...), or None for the CPU."""
    if device.type == "xla":
        return xla
    return None if device.type == "cpu" else getattr(torch, device.type)


def seed_all(seed: int) -> None:
    """Seed the generators of all accelerators of this process (torch.manual_seed covers the CPU's)."""
    kind = accelerator_type()
    if kind is not None:
        module = device_module(torch.device(kind))
        seed_every_device = getattr(module, "manual_seed_all", None) or module.manual_seed  # MPS has one device
        seed_every_device(seed)


def get_device_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's default generator."""
    module = device_module(device)
    return torch.get_rng_state() if module is None else module.get_rng_state(device)


def set_device_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the device's default generator."""
    module = device_module(device)
    if module is None:
        torch.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached device memory; optionally collect garbage first so that more can be released."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        release_pinned_memory()
        # torch.accelerator.empty_cache() raises where a device type has its own kind of allocator (MPS, NPU).
        empty_cache = getattr(device_module(default_device()), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def release_pinned_memory() -> None:
    """Give pinned memory that nobody uses back to the system: torch keeps it.

    Torch crashes where a device brought no allocator of pinned memory: devices that plug in are asked by their module.
    """
    kind = accelerator_type()
    if kind is None:
        return
    owner = torch.accelerator if kind in _WITH_PINNED_ALLOCATOR else device_module(torch.device(kind))
    empty = getattr(owner, "empty_host_cache", None)  # since torch 2.13
    if empty is not None:
        empty()


@functools.cache
def _take_pinned_memory_as_asked() -> None:
    """Let torch not round large requests for pinned memory up to a power of two, unless the user has chosen.

    It is a setting of the process since torch 2.13; before, up to twice the requested size is taken.
    """
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: _ROUNDING_OF_PINNED)()
    if _ROUNDING_OF_PINNED not in settings:
        with suppress(RuntimeError, ValueError):  # an older torch does not know it
            torch._C._accelerator_setAllocatorSettings(f"{_ROUNDING_OF_PINNED}:1")


def pinned_empty(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the host in pinned memory, of the shape, strides and dtype of another one."""
    _take_pinned_memory_as_asked()
    return torch.empty_like(like, device="cpu", pin_memory=True)


def free_memory(index: int) -> int | None:
    """Return the bytes that are free on one of this machine's accelerators; None where its type does not report it."""
    kind = accelerator_type()
    if kind is None:
        return None
    module = device_module(torch.device(kind))
    mem_get_info = getattr(module, "mem_get_info", None)
    if mem_get_info is not None:
        with suppress(RuntimeError):  # some XPUs do not report it, and their drivers raise
            return int(mem_get_info(index)[0])
        with suppress(RuntimeError, AttributeError):
            return int(module.get_device_properties(index).total_memory - module.memory_reserved(index))
        return None
    limit = getattr(module, "recommended_max_memory", None)
    return None if limit is None else int(limit() - module.current_allocated_memory())


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory; None for the CPU, and where its type does not report it."""
    mem_get_info = getattr(device_module(device), "mem_get_info", None)
    if mem_get_info is not None:
        with suppress(RuntimeError):
            return int(mem_get_info(device.index or 0)[1])
    return None


def allocatable_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device: what is free, and what torch keeps; 0 where unknown."""
    free = free_memory(device.index or 0)
    if free is None:
        return 0
    with suppress(RuntimeError, AttributeError):  # a device whose allocator is not torch's
        free += torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free


def contexts(device: torch.device) -> list[int] | None:
    """Return the devices of a kind on which this process has a context; None where torch does not say."""
    has_context: Any = getattr(torch._C, f"_{device.type}_hasPrimaryContext", None)
    if has_context is None:
        return None
    return [index for index in range(torch.accelerator.device_count()) if has_context(index)]


def shares_host_memory() -> bool:
    """Return whether this machine's accelerators compute in the host's memory, as Apple's do."""
    return accelerator_type() == "mps"


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a host tensor in pinned memory, or the tensor itself where pinning is not supported."""
    if tensor.numel() == 0:
        return tensor
    _take_pinned_memory_as_asked()
    try:
        return tensor.pin_memory()
    except (RuntimeError, NotImplementedError):
        return tensor


def supports_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies matrices in fp8: NVIDIA's from Ada, AMD's from MI300."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
        return name.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def supports_low_precision(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether autocast to this dtype works on the device."""
    if device.type == "xla":
        return dtype == torch.bfloat16
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported()
    return True
