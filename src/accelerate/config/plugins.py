"""The public plugin and kwargs-handler classes. They hold values; they read no environment.

Importing this module does not import torch: the two methods that hand their values to torch
(`ProfileKwargs.build`, `DistributedDataParallelKwargs.register_comm_hook`) import it when called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from .enums import DDPCommunicationHookType

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


@dataclass
class KwargsHandler:
    """Hold keyword arguments for a torch object that the library builds."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values, deep-copied."""
        return copy.deepcopy({f.name: getattr(self, f.name) for f in fields(self)})

    def to_kwargs(self) -> dict[str, Any]:
        """Return only the values that differ from their defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Tune `torch.autocast` around the forward pass."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Tune the loss scaler used with `mixed_precision="fp16"`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Tune `torch.distributed.init_process_group`.

    `backend` is taken where it fits the device; the default means "the device's own backend".
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Tune `torch.nn.parallel.DistributedDataParallel` and how gradients travel."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(self, ignore_keys: Sequence[str] = _HOOK_FIELDS) -> dict[str, Any]:
        """Return the values that DDP's constructor takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Install the chosen gradient compression on a DDP model."""
        if self.comm_hook == DDPCommunicationHookType.NO:
            if self.comm_wrapper != DDPCommunicationHookType.NO:
                warnings.warn(
                    f"comm_wrapper={self.comm_wrapper} has no effect without a comm_hook: gradients travel as they "
                    f"are. For compression alone pass comm_hook={self.comm_wrapper}.",
                    stacklevel=2,
                )
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hook_type = DDPCommunicationHookType
        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            hook_type.FP16: default_hooks.fp16_compress_hook,
            hook_type.BF16: default_hooks.bf16_compress_hook,
            hook_type.POWER_SGD: powerSGD_hook.powerSGD_hook,
            hook_type.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        hook = hooks[hook_type(self.comm_hook)]
        wrapper = hook_type(self.comm_wrapper)
        if wrapper == hook_type.FP16:
            hook = default_hooks.fp16_compress_wrapper(hook)
        elif wrapper == hook_type.BF16:
            hook = default_hooks.bf16_compress_wrapper(hook)
        state = None
        if self.comm_hook in (hook_type.POWER_SGD, hook_type.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(process_group=None, **self.comm_state_option)
        model.register_comm_hook(state, _anonymous(hook))


def _anonymous(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook under a neutral name.

    torch refuses its own bf16 hooks on every backend but NCCL, by their `__name__`; gloo reduces bf16 well.
    The annotations are there because DDP checks them.
    """
    import torch
    from torch._C._distributed_c10d import GradBucket

    def compress(state: object, bucket: Any) -> Any:
        return hook(state, bucket)

    compress.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return compress


@dataclass
class ProfileKwargs(KwargsHandler):
    """Tune `torch.profiler.profile` for `Accelerator.profile`."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Build the profiler that these values describe."""
        import torch

        activities = None
        if self.activities is not None:
            known = torch.profiler.ProfilerActivity.__members__
            unknown = [name for name in self.activities if name.upper() not in known]
            if unknown:
                choices = sorted(name.lower() for name in known)
                raise ValueError(f"ProfileKwargs.activities has unknown {unknown}; choose from {choices}.")
            activities = [known[name.upper()] for name in self.activities]
        schedule = torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Say how micro-batches add up to one optimizer step."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """Say how prepared data loaders share out their data."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    constant_memory_shuffle: bool = False
    """Shuffle by a function of (seed, epoch, position) instead of a permutation kept in memory; for huge data sets."""


@dataclass
class ProjectConfiguration:
    """Say where a run keeps its files."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project directory, and the logging directory where none was given."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
