"""A pretend accelerator that really computes: the device type "gpu", two devices, on any machine.

    @on_a_pretend_accelerator
    def test_training_uses_the_device_on_a_pretend_accelerator():   # the body runs where the device exists
        assert Accelerator().device.type == "gpu"

To torch it is an accelerator like any that plugs in from outside (NPU, MLU, ...): it takes torch's `PrivateUse1` place,
`torch.accelerator` finds it, `torch.gpu` is its module, its tensors are plain `torch.Tensor`s with a device index, and
tensors of different devices do not mix. Underneath, device memory is CPU memory under another label, and each
operation runs torch's own CPU kernel on it, so a result that differs from the CPU's is the fault of whoever placed,
cast or seeded something wrongly.

Registering it changes the whole process, so tests run in worker processes that have it from the start.

Where it is less than a device:
- Operations without a CPU kernel are missing (fused LSTM cells). There are no streams and no `torch.Generator("gpu")`,
  storages cannot be made or resized (so FSDP2 does not run), and conjugate views of complex tensors crash.
- Backward passes work on gpu:0 only: torch's autograd asks a C++ interface, which says 1, how many devices there are.
  For the same reason "gpu" without an index is gpu:0 to `tensor.to`, whatever the current device. Ranks that train can
  each use the gpu:0 of their own process (`ACCELERATE_TORCH_DEVICE=gpu:0`).
- `torch.accelerator.empty_cache()` and the memory statistics beside it raise "Allocator for gpu is not a
  DeviceAllocator". That is left so on purpose: they do it on MPS and Ascend NPUs too. `torch.gpu.empty_cache` works.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import DLDeviceType

from tests.ranks import WorkerPool, new_pool

NAME = "gpu"
NUM_DEVICES = 2
CPU = torch.device("cpu")

F = TypeVar("F", bound=Callable[..., Any])

# --- Memory: a device tensor and its host twin share it ---------------------------------------------------------------


class _DLTensorHead(ctypes.Structure):
    """The first fields of a DLPack tensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _relabelled(tensor: Tensor, device_type: DLDeviceType, index: int) -> Tensor:
    """Return a tensor of the same memory that says it is on another device.

    DLPack hands memory from one library to another together with the name of its device; here the name is changed on
    the way. Python offers no other way to make a tensor with a storage of its own on a `PrivateUse1` device.
    """
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    head = _DLTensorHead.from_address(_capsule_pointer(capsule, b"dltensor"))
    head.device_type, head.device_index = device_type, index
    relabelled: Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return relabelled


def _on_host(tensor: Tensor) -> Tensor:
    return _relabelled(tensor, DLDeviceType.kDLCPU, 0) if tensor.device.type == NAME else tensor


class _Memory:
    """The memory of one device: what is alive, and how much there is."""

    def __init__(self) -> None:
        self.limit: float = math.inf
        self._live: list[tuple[StorageWeakRef, int]] = []
        self._prune_at = 256

    def take(self, tensor: Tensor, index: int) -> Tensor:
        """Make the memory of a host tensor the device's."""
        num_bytes = tensor.untyped_storage().nbytes()
        if self.limit < math.inf and self.num_bytes + num_bytes > self.limit:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {num_bytes} bytes on {NAME}:{index}, which has {self.limit} "
                f"bytes and uses {self.num_bytes}."
            )
        placed = _relabelled(tensor, DLDeviceType.kDLExtDev, index)
        self._live.append((StorageWeakRef(placed.untyped_storage()), num_bytes))
        if len(self._live) > self._prune_at:
            self._prune()
            self._prune_at = 2 * len(self._live) + 256
        return placed

    def _prune(self) -> None:
        self._live = [entry for entry in self._live if not entry[0].expired()]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors that are alive."""
        self._prune()
        return sum(num_bytes for _, num_bytes in self._live)


# --- torch.gpu --------------------------------------------------------------------------------------------------------


class PretendDeviceModule:
    """What torch and its users expect of a device's module, as `torch.cuda` has it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """How often each function that leaves no other trace was called."""
        self._memory = [_Memory() for _ in range(NUM_DEVICES)]
        self._current = 0
        self._generator_states: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Be as new: the first device is current, generators have their default seeds, memory has no limit."""
        self.calls.clear()
        self._current = 0
        self.manual_seed_all(torch.Generator().initial_seed())
        for memory in self._memory:
            memory.limit = math.inf

    # Devices

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: torch.device | str | int) -> None:
        index = self.index_of(device)
        if index >= NUM_DEVICES:
            raise RuntimeError(f"invalid device ordinal {index}: there are {NUM_DEVICES} {NAME} devices")
        self._current = index

    def index_of(self, device: torch.device | str | int | None) -> int:
        """Return the index that a device names: the current one where it names none."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self._current if index is None else index

    @contextmanager
    def device(self, device: torch.device | str | int | None) -> Iterator[None]:
        """Make a device the current one inside the block."""
        before = self._current
        self.set_device(self.index_of(device))
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        self.calls["synchronize"] += 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    # Generators: one state per device, and the CPU's is another.

    def manual_seed_all(self, seed: int) -> None:
        self._generator_states = [torch.Generator().manual_seed(seed).get_state() for _ in range(NUM_DEVICES)]

    def manual_seed(self, seed: int) -> None:
        self._generator_states[self._current] = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: torch.device | str | int | None = None) -> Tensor:
        return self._generator_states[self.index_of(device)].clone()

    def set_rng_state(self, state: Tensor, device: torch.device | str | int | None = None) -> None:
        self._generator_states[self.index_of(device)] = state.clone()

    @contextmanager
    def _generator_of(self, index: int) -> Iterator[None]:
        """Let the CPU kernels inside the block draw from a device's generator."""
        host_state = torch.get_rng_state()
        torch.set_rng_state(self._generator_states[index])
        try:
            yield
        finally:
            self._generator_states[index] = torch.get_rng_state()
            torch.set_rng_state(host_state)

    # Memory

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def memory_allocated(self, device: torch.device | str | int | None = None) -> int:
        return self._memory[self.index_of(device)].num_bytes

    @contextmanager
    def memory_limit(self, num_bytes: int, device: torch.device | str | int | None = None) -> Iterator[None]:
        """Let a device run out of memory inside the block when its live tensors exceed `num_bytes`."""
        memory = self._memory[self.index_of(device)]
        before, memory.limit = memory.limit, num_bytes
        try:
            yield
        finally:
            memory.limit = before

    def take(self, tensor: Tensor, index: int) -> Tensor:
        """Make a new host tensor's memory a device's."""
        return self._memory[index].take(tensor, index)


device_module = PretendDeviceModule()

# --- Kernels: the CPU's, on the host twins of device tensors ----------------------------------------------------------


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors of an operator's argument or result: at most lists of them."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(found.append, list(values))
    return found


# x[indices] brings the indices to x.
_TAKES_HOST_INDICES = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


def _common_index(op: Any, tensors: list[Tensor], factory_device: torch.device | None) -> int:
    """Return the device that an operation runs on; refuse tensors of several devices, as kernels of devices do."""
    placed = [tensor for tensor in tensors if tensor.device.type == NAME]
    if not placed:
        return device_module.index_of(factory_device)
    device, name = placed[0].device, op._schema.name
    for tensor in tensors:
        # Numbers may come from the CPU, but not in lists.
        is_number = tensor.dim() == 0 and tensor.device == CPU and "Tensor[]" not in str(op._schema)
        if tensor.device != device and not is_number and name not in _TAKES_HOST_INDICES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{tensor.device}! (when checking arguments of {name})"
            )
    return device_module.index_of(device)


def _device_kernel(op: Any) -> Callable[..., Any]:
    """Return a kernel that runs an operator's CPU kernel on the memory of device tensors."""
    draws_random_numbers = torch.Tag.nondeterministic_seeded in op.tags
    outs = {argument.name for argument in op._schema.arguments if argument.is_out}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors_in([*args, *kwargs.values()])
        index = _common_index(op, tensors, kwargs.get("device"))
        device_tensors: dict[int, Tensor] = {}  # by the id of their twins, which an operation in place returns

        def twin_of(tensor: Tensor) -> Tensor:
            twin = _on_host(tensor)
            device_tensors[id(twin)] = tensor
            return twin

        def placed(result: Tensor) -> Tensor:
            known = device_tensors.get(id(result))
            return known if known is not None else device_module.take(result, index)

        host_args = [_map_tensors(twin_of, arg) for arg in args]
        host_kwargs = {key: _map_tensors(twin_of, value) for key, value in kwargs.items()}
        # An empty `out=` is there to be resized, which the memory of another library cannot be: it is replaced.
        to_replace = {key: kwargs[key] for key in outs if key in kwargs and kwargs[key].numel() == 0}
        host_kwargs |= {key: torch.empty(0, dtype=out.dtype) for key, out in to_replace.items()}
        if "device" in kwargs:
            host_kwargs["device"] = CPU
        host_kwargs.pop("pin_memory", None)
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")

        if draws_random_numbers:
            with device_module._generator_of(index):
                results = op(*host_args, **host_kwargs)
        else:
            results = op(*host_args, **host_kwargs)

        for key, out in to_replace.items():
            filled = host_kwargs[key]
            device_tensors[id(filled)] = out
            torch.ops.aten.set_.source_Tensor(out, device_module.take(filled, index))
        return _map_tensors(placed, results)

    return kernel


_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _metadata_kernel(op: Any) -> Callable[..., Any]:
    """Return torch's CPU kernel itself: it only writes sizes, strides and storages, wherever the memory is."""
    return functools.partial(op.redispatch, _CPU_KEYS)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _on_host(target).copy_(_on_host(source))
    return target


def _pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    return tensor.clone()


_METADATA = frozenset(
    {
        *("as_strided", "view", "_reshape_alias", "unfold", "view_as_complex", "view_as_real", "is_set_to", "resize_"),
        *("set_", "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset"),
    }
)
# These have no CPU kernel of their own because they choose one by the name of the device.
_CHOSEN_BY_DEVICE_NAME = ("convolution", "convolution_backward")


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _register_kernels(library: torch.library.Library) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    every_name = torch._C._dispatch_get_all_op_names()  # type: ignore[attr-defined]
    names = [
        name.removeprefix("aten::") for name in every_name if name.startswith("aten::") and has_kernel(name, "CPU")
    ]
    for name in (*names, *_CHOSEN_BY_DEVICE_NAME):
        operator = _operator(name)
        kernel = _metadata_kernel(operator) if name in _METADATA else _device_kernel(operator)
        library.impl(name, kernel, "PrivateUse1")
    library.impl("_copy_from", _copy, "PrivateUse1")
    library.impl("_pin_memory", _pin_memory, "CPU")


# --- Collectives: gloo's, on the host twins ---------------------------------------------------------------------------


def _register_collectives(library: torch.library.Library) -> None:
    """Let gloo serve the device. All of c10d writes into tensors it is given, so twins are all it needs."""
    every_name = torch._C._dispatch_get_all_op_names()  # type: ignore[attr-defined]
    for name in (name.removeprefix("c10d::") for name in every_name if name.startswith("c10d::")):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "PrivateUse1"):
            kernel = _device_kernel(getattr(torch.ops.c10d, name).default)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's kernels hand device memory to gloo, which refuses it
                library.impl(name, kernel, "PrivateUse1")
    dist.Backend.default_device_backend_map[NAME] = dist.Backend.GLOO


# --- Autocast: the casts that torch's CPU autocast makes, so that results can be compared -----------------------------

_IN_LOW_PRECISION = (
    *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
)
_IN_FULL_PRECISION = (
    *("cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


def _autocast_kernel(op: Any, dtype_now: Callable[[], torch.dtype]) -> Callable[..., Any]:
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_now()

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

        with torch._C._ExcludeDispatchKeyGuard(off):
            return op(
                *(_map_tensors(cast, arg) for arg in args),
                **{name: _map_tensors(cast, value) for name, value in kwargs.items()},
            )

    return kernel


def _register_autocast(library: torch.library.Library, fallbacks: torch.library.Library) -> None:
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _IN_LOW_PRECISION:
        kernel = _autocast_kernel(_operator(name), lambda: torch.get_autocast_dtype(NAME))
        library.impl(name, kernel, "AutocastPrivateUse1")
    for name in _IN_FULL_PRECISION:
        kernel = _autocast_kernel(_operator(name), lambda: torch.float32)
        library.impl(name, kernel, "AutocastPrivateUse1")


# --- Registration -----------------------------------------------------------------------------------------------------


@functools.cache
def register() -> tuple[torch.library.Library, ...]:
    """Make this process one that has the device; the libraries keep the kernels alive."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=device_module)
    operators, collectives, fallbacks = (torch.library.Library(name, "IMPL") for name in ("aten", "c10d", "_"))
    _register_kernels(operators)
    _register_collectives(collectives)
    _register_autocast(operators, fallbacks)
    _give_torch_accelerator_a_current_device()
    torch.serialization.register_package(5, lambda storage: None, _load_storage)
    return operators, collectives, fallbacks


def _give_torch_accelerator_a_current_device() -> None:
    """Answer what `torch.accelerator` asks of a C++ interface that backends written in Python cannot fill."""

    def exchange(index: int) -> int:
        before = device_module.current_device()
        if index >= 0:
            device_module.set_device(index)
        return before

    answers: dict[str, Callable[..., Any]] = {
        "_accelerator_getDeviceIndex": device_module.current_device,
        "_accelerator_setDeviceIndex": exchange,
        "_accelerator_exchangeDevice": exchange,
        "_accelerator_maybeExchangeDevice": exchange,
        "_accelerator_synchronizeDevice": device_module.synchronize,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, answer)


def _load_storage(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Load a storage that was saved from the device, for `torch.load`."""
    if location.partition(":")[0] != NAME:
        return None
    host = torch.empty(0, dtype=torch.uint8).set_(storage)
    return host.to(torch.device(location)).untyped_storage()


# --- Tests ------------------------------------------------------------------------------------------------------------


@functools.cache
def _processes_with_the_device() -> WorkerPool:
    return new_pool()


def _run_where_the_device_is(module: str, qualname: str, arguments: dict[str, Any]) -> Any:
    """Run a function, in a worker process: the device is there before anything else is imported."""
    register()
    device_module.reset()
    function: Any = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    return getattr(function, "device_body", function)(**arguments)


def run_on_a_pretend_accelerator(
    function: Callable[..., Any], /, *, world_size: int = 1, time_limit: float = 200.0, **arguments: Any
) -> list[Any]:
    """Run a module-level function on every rank of a world that has the device; return what each rank returned.

    A failure in the process is the test's, with its traceback. What is returned must not name the device, which the
    caller's process does not know: return CPU tensors and strings. Processes are kept for the next call.
    """
    job = {"module": function.__module__, "qualname": function.__qualname__, "arguments": arguments}
    return _processes_with_the_device().run(world_size, _run_where_the_device_is, job, time_limit=time_limit)


def on_a_pretend_accelerator(body: F) -> F:
    """Run a test's body in a process that has the device. Fixtures it asks for must pickle."""

    @functools.wraps(body)
    def in_another_process(**fixtures: Any) -> None:
        run_on_a_pretend_accelerator(in_another_process, **fixtures)

    in_another_process.device_body = body  # type: ignore[attr-defined]
    return in_another_process  # type: ignore[return-value]
