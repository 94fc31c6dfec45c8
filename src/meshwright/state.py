"""`PartialState`, `AcceleratorState` and `GradientState`: views of the `Runtime` with the published interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .config.enums import DistributedType
from .config.plugins.handlers import InitProcessGroupKwargs
from .config.settings import TrainingSettings
from .data.splitting import share_of
from .parallel.base import Strategy
from .runtime.devices import device as devices
from .runtime.group.runtime import Runtime
from .runtime.loop.gradient_state import GradientState
from .watch import watch

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["AcceleratorState", "GradientState", "PartialState", "do_nothing", "is_initialized"]


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing: stands for a guarded function on the other processes."""


def is_initialized() -> bool:
    """Return whether an `Accelerator` or `AcceleratorState` exists in this process."""
    runtime = Runtime.existing()
    return runtime is not None and runtime.training is not None


def settings_of_first() -> TrainingSettings | None:
    """Return the settings of the first Accelerator of this process, which later ones have unless they say otherwise."""
    runtime = Runtime.existing()
    return None if runtime is None else runtime.settings


_OF_RUNTIME = {"backend", "debug", "device", "fork_launched", "local_process_index", "num_processes", "process_index"}
"""Attributes of a state that scripts may set, and that all states of the process have in common."""


class _SharedState:
    """The value of `PartialState._shared_state`: the attributes of the runtime, empty without one."""

    def __get__(self, instance: object, owner: type[PartialState]) -> dict[str, Any]:
        runtime = Runtime.existing()
        return {} if runtime is None else owner._attributes(runtime)


class PartialState:
    """The rank, the device and the process group of this process.

    Usable without an `Accelerator`; making one starts the process group if a launcher started several processes.
    """

    _shared_state = _SharedState()
    _started: Runtime

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self._started = Runtime.start(cpu=cpu, init_handler=_init_handler(kwargs))
        watch(self._started)

    def __getstate__(self) -> dict[str, Any]:
        """Return the published attributes: they can be read where only the published package is installed."""
        return self._attributes(self._started)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a state of this process, or show what was saved where nothing is started."""
        vars(self)["_started"] = Runtime.existing() or Runtime.recorded(state)

    @property
    def _runtime(self) -> Runtime:
        """The runtime that attributes are read from. After a reset there is none until a state is created again."""
        if Runtime.existing() is None:
            raise AttributeError("_runtime")
        return self._started

    def __getattr__(self, name: str) -> Any:
        """Explain why an attribute is missing after a reset."""
        own = type(self).__name__
        if "_started" in vars(self) and Runtime.existing() is None and hasattr(type(self), name):
            raise AttributeError(
                f"`{own}` object has no attribute `{name}`. This happens if `{own}._reset_state()` was called: make an "
                "Accelerator or a PartialState again."
            )
        raise AttributeError(f"{own!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what belongs to the process for all of its states, as published: `PartialState().debug = True`."""
        if name in _OF_RUNTIME:
            setattr(self._runtime, name, value)
        else:
            super().__setattr__(name, value)

    @staticmethod
    def _attributes(runtime: Runtime) -> dict[str, Any]:
        return {
            "_cpu": runtime.cpu,
            "backend": runtime.backend,
            "device": runtime.device,
            "debug": runtime.debug,
            "distributed_type": runtime.distributed_type,
            "num_processes": runtime.num_processes,
            "process_index": runtime.process_index,
            "local_process_index": runtime.local_process_index,
            "fork_launched": runtime.fork_launched,
        }

    @staticmethod
    def _reset_state() -> None:
        """Drop the runtime; an open process group stays open, and the next runtime adopts it."""
        Runtime.detach()

    @property
    def initialized(self) -> bool:
        """Return whether this state has a live runtime."""
        return Runtime.existing() is self._started

    @property
    def _cpu(self) -> bool:
        return self._runtime.cpu

    @property
    def backend(self) -> str | None:
        """Return the collective backend of the device, or None on a single process."""
        return self._runtime.backend

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self._runtime.device

    @property
    def default_device(self) -> torch.device:
        """Return the accelerator of this machine, or the CPU."""
        return devices.default_device()

    @property
    def debug(self) -> bool:
        """Return whether collectives compare shapes first."""
        return self._runtime.debug

    @property
    def distributed_type(self) -> DistributedType:
        """Return the distributed type of the processes."""
        return self._runtime.distributed_type

    @distributed_type.setter
    def distributed_type(self, distributed_type: DistributedType) -> None:
        self._runtime.distributed_type = distributed_type

    @property
    def num_processes(self) -> int:
        """Return the number of processes."""
        return self._runtime.num_processes

    @property
    def process_index(self) -> int:
        """Return the rank of this process."""
        return self._runtime.process_index

    @property
    def local_process_index(self) -> int:
        """Return the rank of this process on its host."""
        return self._runtime.local_process_index

    @property
    def fork_launched(self) -> bool:
        """Return whether a notebook launcher forked this process."""
        return self._runtime.fork_launched

    @property
    def use_distributed(self) -> bool:
        """Return whether there are several processes."""
        return self._runtime.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self._runtime.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its host."""
        return self._runtime.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the highest rank."""
        return self._runtime.is_last_process

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this point."""
        self._runtime.barrier()

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        devices.activate(self._runtime.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Close a process group: the given one, or that of this process."""
        if group is not None:
            dist.destroy_process_group(group)
        else:
            self._runtime.leave_group()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tuple, tensor, data set, or dict of equally long ones.

        The first processes get one element more where it does not divide; `apply_padding` repeats the last element so
        that all parts are equally long and can be gathered.
        """
        yield share_of(inputs, self.num_processes, self.process_index, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 run the block before the others."""
        return self._runtime.main_process_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of every host run the block before the others."""
        return self._runtime.main_process_first(self.is_local_main_process)

    def on_main_process(self, function: F | None = None) -> Any:
        """Run the decorated function on rank 0 only."""
        return self._only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Run the decorated function once per host."""
        return self._only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F) -> Any:
        """Run the decorated function on the highest rank only."""
        return self._only_where(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Run the decorated function on one rank only. A single process is every rank, as published."""
        _require_index("on_process", "process_index", process_index)
        return self._only_where(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Run the decorated function on one local rank of every host only. A single process is every rank."""
        _require_index("on_local_process", "local_process_index", local_process_index)
        return self._only_where(
            lambda: not self.use_distributed or self.local_process_index == local_process_index, function
        )

    def _only_where(self, here: Callable[[], bool], function: F | None) -> Any:
        if function is None:
            return partial(self._only_where, here)

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return guarded

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """A `PartialState` with the settings of one Accelerator.

    Every `Accelerator` creates a record of its own, so two of them in one process may differ. `AcceleratorState()`
    without arguments is a view of the newest record.
    """

    _mixed_precision: str
    deepspeed_plugins: Any
    fsdp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: Any
    device_mesh: Any
    is_fsdp2: bool
    _engine: DistributedType | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        runtime = Runtime.start(cpu=cpu, init_handler=_init_handler(kwargs))
        watch(runtime)
        if runtime.training is None or mixed_precision is not None or _from_accelerator:
            settings = TrainingSettings.from_arguments(
                mixed_precision=mixed_precision,
                gradient_accumulation_steps=1,
                gradient_accumulation_plugin=None,
                dynamo_plugin=dynamo_plugin,
                deepspeed_plugins=deepspeed_plugin,
            )
            runtime.training = {
                "_started": runtime,
                "_mixed_precision": settings.mixed_precision,
                "dynamo_plugin": settings.compilation,
                "deepspeed_plugins": settings.deepspeed,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
                "device_mesh": None,
                "is_fsdp2": False,
                "_engine": None,
            }
            if not _from_accelerator:
                runtime.settings = runtime.settings or settings
        self.__dict__ = runtime.training

    def __getstate__(self) -> dict[str, Any]:
        """Return the published attributes, and the settings of the Accelerator that this state is of."""
        return PartialState._attributes(self._started) | {k: v for k, v in vars(self).items() if k != "_started"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the settings that were saved, beside a state of this process."""
        super().__setstate__(state)
        vars(self).update((name, value) for name, value in state.items() if not hasattr(type(self), name))

    @staticmethod
    def _attributes(runtime: Runtime) -> dict[str, Any]:
        if runtime.training is None:
            return {}
        own = {name: value for name, value in runtime.training.items() if name != "_started"}
        return PartialState._attributes(runtime) | own

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Drop the newest Accelerator's settings, and with `reset_partial_state` the runtime too."""
        runtime = Runtime.existing()
        if runtime is not None:
            runtime.training = runtime.settings = None
        if reset_partial_state:
            Runtime.detach()

    @property
    def initialized(self) -> bool:
        """Return whether this is a live record."""
        return super().initialized and is_initialized()

    def _describe(self, strategy: Strategy, settings: TrainingSettings) -> None:
        """Set the published attributes that describe a strategy. The settings of the first one are those of later ones.

        An Accelerator that fails has not come here, and leaves nothing to later ones.
        """
        self.__dict__.update(strategy.published)
        self._started.settings = self._started.settings or settings
        mesh = strategy.mesh
        if mesh is not None:
            self.parallelism_config, self.device_mesh = mesh.config, mesh.device_mesh
            if mesh.sharding is not None:
                self.fsdp_plugin, self.is_fsdp2, self._engine = strategy.plugin, True, DistributedType.FSDP  # type: ignore[attr-defined]
        if self.megatron_lm_plugin is not None:
            if self.is_main_process:
                self.megatron_lm_plugin.log_translation()
            if self.use_distributed:
                self._engine = DistributedType.MEGATRON_LM

    @property
    def deepspeed_plugin(self) -> Any:
        """Return the plugin that the next model uses, or None where DeepSpeed does not train."""
        plugins = self.deepspeed_plugins or {}
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of the plugins by its name."""
        plugins = self.deepspeed_plugins or {}
        if not plugins:
            raise ValueError(f"DeepSpeed is not enabled: there is no plugin {name!r}. Give Accelerator one.")
        if name not in plugins:
            raise ValueError(f"There is no DeepSpeed plugin {name!r}: there are {', '.join(plugins)}.")
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Choose the plugin that the models prepared from now on use."""
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values():
            plugin._deselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def distributed_type(self) -> DistributedType:
        """Return the engine that distributes the models, else the distributed type of the processes."""
        return self._engine or self._runtime.distributed_type

    @distributed_type.setter
    def distributed_type(self, distributed_type: DistributedType) -> None:
        self._engine = distributed_type

    @property
    def mixed_precision(self) -> str:
        """Return the number format of the forward pass."""
        if Runtime.existing() is None:
            raise AttributeError("mixed_precision")  # `__getattr__` says why
        return self._mixed_precision

    def __repr__(self) -> str:
        return super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"


def _require_index(decorator: str, argument: str, index: int | None) -> None:
    if index is None:
        raise ValueError(f"{decorator}() needs to know which process: @state.{decorator}({argument}=1).")


def _init_handler(kwargs: dict[str, Any]) -> InitProcessGroupKwargs | None:
    """Read the process-group options that `PartialState` takes by name."""
    options = {name: value for name, value in kwargs.items() if name != "_use_sagemaker_dp"}  # transformers passes it
    unknown = sorted(options.keys() - {f.name for f in fields(InitProcessGroupKwargs)})
    if unknown:
        raise TypeError(
            f"PartialState() takes cpu and the options of InitProcessGroupKwargs (backend, init_method, timeout); "
            f"it does not know {', '.join(unknown)}."
        )
    return InitProcessGroupKwargs(**options) if options else None
