"""XLA devices, such as TPUs: the only module that imports torch_xla.

`torch.accelerator` does not see these devices, and there is no `torch.xla`: the functions here that have names of
`torch.cuda` stand for it.

[Note: graphs] Operations on an XLA tensor are recorded, and compiled and run at `sync`. A recorded graph that was seen
before is not compiled again, so a loop is fast if every step records the same graph. One step is one graph: `end_step`
syncs after an optimizer's step, and a loader syncs before it hands out a batch, unless a step has just done so. Without
the latter an evaluation, which has no steps, would record one graph of all its batches.

[Note: SPMD] A process that has several devices uses all of them, as one: torch_xla's SPMD mode. The mode cannot change
once a device was used: torch_xla 2.9 then crashes. It is therefore chosen here, before the first use.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...config.environment import read_setting
from ...config.packages import has_package
from ...errors import RuntimeConflictError, UnsupportedSettingError
from ...errors.callers import warn
from ...program import program_name
from ..process import ProcessInfo

_STEPS_TO_WARM_UP = 3
"""The first step makes the optimizer's state, so that the second differs from it."""
_RECENT_STEPS, _MOST_COMPILATIONS = 10, 5
"""How many of the recent steps may compile: a short last batch and an evaluation do so once."""


def install_xla(upgrade: bool = False) -> None:
    """Install the release of torch_xla that is for this torch, in a notebook of Google Colab.

    Args:
        upgrade: Replace a release that is installed.
    """
    if not has_package("google.colab"):
        raise RuntimeError("install_xla() works on Google Colab only. Elsewhere: pip install 'torch_xla[tpu]'.")
    release = ".".join(torch.__version__.split(".")[:2])
    options = ["--upgrade"] if upgrade else []
    subprocess.run([sys.executable, "-m", "pip", "install", *options, f"torch_xla[tpu]~={release}.0"], check=True)


@functools.cache
def _imported(name: str) -> Any:
    return importlib.import_module(name)


def _runtime() -> Any:
    return _imported("torch_xla.runtime")


@functools.cache
def _can_import() -> bool:
    if not has_package("torch_xla"):
        return False
    try:
        _imported("torch_xla")
    except (ImportError, OSError) as error:  # built for another torch
        warn(f"torch_xla is installed and cannot be imported, so it is not used: {error}. USE_TORCH_XLA=0 hides this.")
        return False
    return True


def is_used() -> bool:
    """Return whether this machine computes on XLA devices: torch_xla is installed, and USE_TORCH_XLA is not false."""
    return read_setting("use_torch_xla") is not False and _can_import()


def kind_of_hardware() -> str:
    """Return what is behind XLA: TPU, CPU, CUDA or NEURON."""
    return str(_runtime().device_type())


@functools.cache
def settle_mode() -> None:
    """Choose SPMD mode if this process alone has several devices. See [Note: SPMD]."""
    runtime = _runtime()
    was_used = _imported("torch_xla")._XLAC._xla_get_spmd_config_is_locked()
    if not was_used and not is_spmd() and runtime.world_size() == 1 and device_count() > 1:
        runtime.use_spmd()


def default_device() -> torch.device:
    """Return the device of this process. In SPMD mode it stands for all devices."""
    settle_mode()
    device: torch.device = _imported("torch_xla").device()
    return device


def world_size() -> int:
    """Return the number of processes that torch_xla has started, or of devices if they share one."""
    return int(_runtime().world_size())


def launch(function: Callable[..., None], args: tuple[Any, ...], start_method: str = "spawn") -> None:
    """Call `function(index, *args)` in a new process for every device, and wait for all of them."""
    _imported("torch_xla").launch(function, args, start_method=start_method)


def processes(launched: ProcessInfo) -> ProcessInfo:
    """Return the ranks that XLA sees, and refuse processes that it does not see."""
    settle_mode()
    runtime = _runtime()
    seen = int(runtime.process_count()) if is_spmd() else world_size()
    if launched.world_size not in (1, seen):
        raise RuntimeConflictError(
            f"Rank {launched.rank}: {launched.launcher} has started {launched.world_size} processes, and XLA sees "
            f"{seen} on {kind_of_hardware()}: each would train alone, as rank 0 of {seen}. Start one "
            "process, `python script.py`, which uses all devices of its host; or let torch_xla start the processes, by "
            f"`{program_name()} launch --tpu --main_training_function FUNCTION script.py`. "
            "USE_TORCH_XLA=0 trains without XLA."
        )
    if seen == 1:
        return ProcessInfo()
    if is_spmd() or device_count() > 1:
        raise UnsupportedSettingError(
            "SPMD over several hosts" if is_spmd() else "a thread for every XLA device of a process",
            "here a process has one rank, and drives all of its devices.",
            "Start one process on one host, `python script.py`.",
        )
    return ProcessInfo(
        rank=runtime.global_ordinal(),
        world_size=seen,
        local_rank=runtime.local_ordinal(),
        local_world_size=runtime.local_device_count(),
        launcher="torch_xla",
    )


# --- what torch.cuda has for its devices ------------------------------------------------------------------------------


def device_count() -> int:
    """Return the number of devices that this process drives."""
    return int(_runtime().addressable_runtime_device_count())


def get_device_name(index: int) -> str:
    """Return the name of a device, such as `TPU:0`."""
    return str(_imported("torch_xla").real_devices()[index])


def is_initialized() -> bool:
    """Return whether a device is in use, so that a forked process could not use it."""
    return bool(_imported("torch_xla")._XLAC._xla_runtime_is_initialized())


def manual_seed_all(seed: int) -> None:
    """Seed the generator of XLA."""
    settle_mode()
    _imported("torch_xla").manual_seed(seed % 2**64)


def get_rng_state(device: torch.device | None = None) -> torch.Tensor:
    """Return the state of XLA's generator, a seed: the bits of an unsigned number."""
    settle_mode()
    seed = int(_imported("torch_xla.core.xla_model").get_rng_state())
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def set_rng_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Set the state of XLA's generator."""
    manual_seed_all(int(state))


def mem_get_info(index: int) -> tuple[int, int]:
    """Return the bytes that are free on a device, and all of them. XLA's CPU device raises."""
    found = _imported("torch_xla.core.xla_model").get_memory_info(torch.device("xla", index))
    return int(found["bytes_limit"] - found["bytes_used"]), int(found["bytes_limit"])


# --- steps ------------------------------------------------------------------------------------------------------------


def sync() -> None:
    """Compile and run what was recorded; the host does not wait for it."""
    _imported("torch_xla").sync()


def reduce_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients of an optimizer over all processes."""
    _imported("torch_xla.core.xla_model").reduce_gradients(optimizer)


def broadcast_parameters(model: torch.nn.Module) -> None:
    """Give all processes the parameters and buffers of the first."""
    _imported("torch_xla.core.xla_model").broadcast_master_param(model)


def collective_backend() -> str:
    """Return the name of the backend of torch_xla, which its module registers."""
    return str(_imported("torch_xla.distributed.xla_backend") and "xla")


def compilations() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(_imported("torch_xla.debug.metrics").counter_value("UncachedCompile") or 0)


class Loop:
    """The training loop as XLA sees it: batches, steps, and the graphs that were compiled. See [Note: graphs]."""

    def __init__(self) -> None:
        self.mesh: Any = None
        """The SPMD mesh over which batches are sharded, or None for one device."""
        self._has_synced = True
        self._steps = 0
        self._compiled = 0
        self._recent: deque[bool] | None = deque(maxlen=_RECENT_STEPS)
        """Whether each of the recent steps compiled; None once that was reported."""
        self._shapes: dict[str, list[tuple[int, ...]]] = {}

    def close_batch(self) -> None:
        """Run what was recorded since the last batch, unless a step has done so."""
        if not self._has_synced:
            sync()
        self._has_synced = False

    def open_batch(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Shard the tensors of a new batch over the mesh, and note their shapes."""
        for name, tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            if self._recent is not None:
                shapes, shape = self._shapes.setdefault(name, []), tuple(tensor.shape)
                if shape not in shapes[-4:]:
                    shapes.append(shape)
            if self.mesh is not None and tensor.dim():
                shard(tensor, self.mesh, self.mesh.axis_names)

    def end_step(self) -> None:
        """Run an optimizer step; warn if most steps compile a new graph."""
        sync()
        self._has_synced = True
        self._steps += 1
        if self._recent is None:
            return
        before, self._compiled = self._compiled, compilations()
        if self._steps > _STEPS_TO_WARM_UP:
            self._recent.append(self._compiled > before)
            if sum(self._recent) == _MOST_COMPILATIONS:
                warn(self._reason(len(self._recent)))
                self._recent = None
                self._shapes.clear()

    def _reason(self, steps: int) -> str:
        changing = {name: shapes for name, shapes in self._shapes.items() if len(shapes) > 1}
        cause = "No tensor of the batches changes its shape: look for a number or a shape in the step that changes"
        remedy = "PT_XLA_DEBUG=1 names the lines"
        if changing:
            listed = (f"batch{name} had {', '.join(map(str, shapes[-4:]))}" for name, shapes in changing.items())
            cause = f"Shapes change: {'; '.join(listed)}"
            remedy = "Pad them to one length, or to few, and drop a short last batch (drop_last=True)"
        return (
            f"XLA compiled a new graph in {_MOST_COMPILATIONS} of the last {steps} steps, which takes longer than the "
            f"steps. {cause}. {remedy}."
        )


loop = Loop()


def begin_loop(mesh: Any) -> None:
    """Begin a new loop, whose batches are sharded over a mesh."""
    global loop
    loop = Loop()
    loop.mesh = mesh


# --- SPMD -------------------------------------------------------------------------------------------------------------


def is_spmd() -> bool:
    """Return whether this process is in SPMD mode, in which one device stands for all."""
    return bool(_runtime().is_spmd())


def spmd_mesh(axes: dict[str, int]) -> Any:
    """Return a mesh of all devices with these axes."""
    if not is_spmd():
        raise RuntimeConflictError(
            f"A tensor was put on XLA before there was an Accelerator, so XLA uses one of {device_count()} devices "
            "and cannot change that. Make the Accelerator first, or call torch_xla.runtime.use_spmd() first of all."
        )
    spmd = _imported("torch_xla.distributed.spmd")
    return spmd.Mesh(list(range(device_count())), tuple(axes.values()), tuple(axes))


def shard(tensor: torch.Tensor, mesh: Any, axes: str | tuple[str, ...]) -> None:
    """Shard the first dimension of a tensor over axes of a mesh, in place, unless it is sharded already."""
    if sharding_of(tensor):
        return
    _imported("torch_xla.distributed.spmd").mark_sharding(tensor, mesh, (axes, *[None] * (tensor.dim() - 1)))


def sharding_of(tensor: torch.Tensor) -> str:
    """Return XLA's description of how a tensor is sharded; empty if it is not."""
    return str(_imported("torch_xla")._XLAC._get_xla_sharding_spec(tensor))


def separate_backward(module: torch.nn.Module) -> None:
    """Keep the compiler from merging the backward pass of a module with that of others."""
    _imported("torch_xla.distributed.spmd.xla_sharding").apply_backward_optimization_barrier(module)
