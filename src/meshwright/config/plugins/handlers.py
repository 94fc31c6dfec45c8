"""The public plugin and kwargs-handler classes. They hold values; they read no environment.

Importing this module does not import torch: the two methods that hand their values to torch
(`ProfileKwargs.build`, `DistributedDataParallelKwargs.register_comm_hook`) import it when called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ...errors.callers import warn
from ..enums import DDPCommunicationHookType

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
    """Whether the forward pass runs in the lower precision; False computes in the dtypes of the tensors."""
    cache_enabled: bool | None = None
    """Whether casted weights are kept until the context ends; None leaves torch's own choice."""


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Tune the loss scaler used with `mixed_precision="fp16"`."""

    init_scale: float = 65536.0
    """The factor of the first loss."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps without an overflow."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by after a step whose gradients are not finite; that step is skipped."""
    growth_interval: int = 2000
    """Steps without an overflow before the scale grows."""
    enabled: bool = True
    """Whether losses are scaled at all."""


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Tune `torch.distributed.init_process_group`.

    `backend` is taken where it fits the device; the default means "the device's own backend".
    """

    backend: str | None = "nccl"
    """Backend of the process group, such as "nccl" or "gloo". "nccl" is no choice where the device is not CUDA."""
    init_method: str | None = None
    """URL of the rendezvous, such as `tcp://host:port`; by default the launcher's."""
    timeout: timedelta | None = None
    """How long a collective may take before the backend gives up; None leaves the backend's own default."""


_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Tune `torch.nn.parallel.DistributedDataParallel` and the communication of gradients."""

    dim: int = 0
    """Axis of the batch. It has no effect with one device per process, which is the only way here."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks at the start of every forward pass."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients, in MiB. One bucket is one all-reduce."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that take no part in the loss. Needed if there are any; costs time."""
    check_reduction: bool = False
    """A published argument of DDP that torch ignores."""
    gradient_as_bucket_view: bool = False
    """Let gradients be views into the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """How gradients are sent: as they are, in fp16, in bf16, or compressed by PowerSGD."""
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    """A number format around `comm_hook`: PowerSGD in fp16, for example."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of PowerSGD's state, such as `matrix_approximation_rank`."""

    def to_dict(self, ignore_keys: Sequence[str] = _HOOK_FIELDS) -> dict[str, Any]:
        """Return the values that DDP's constructor takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Install the chosen gradient compression on a DDP model."""
        if self.comm_hook == DDPCommunicationHookType.NO:
            if self.comm_wrapper != DDPCommunicationHookType.NO:
                warn(
                    f"comm_wrapper={self.comm_wrapper} has no effect without a comm_hook: gradients are not "
                    f"compressed. For compression alone pass comm_hook={self.comm_wrapper}.",
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
    """What is recorded: "cpu", "cuda", "xpu", ... ; by default everything that torch can."""
    schedule_option: dict[str, int] | None = None
    """Arguments of `torch.profiler.schedule`: `wait`, `warmup`, `active`, `repeat`, `skip_first`."""
    on_trace_ready: Callable[..., Any] | None = None
    """Called with the profiler whenever a cycle of the schedule is complete."""
    record_shapes: bool = False
    """Record the shapes of the inputs of operators."""
    profile_memory: bool = False
    """Record allocations."""
    with_stack: bool = False
    """Record the line of source of every operator."""
    with_flops: bool = False
    """Estimate the floating-point operations of matrix products and convolutions."""
    with_modules: bool = False
    """Record which module an operator belongs to. torch supports this for TorchScript models only."""
    output_trace_dir: str | None = None
    """Folder to which every process writes `profile_<rank>.json` when the block ends."""

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
    """Configure how micro-batches add up to one optimizer step."""

    num_steps: int | None = None
    """Micro-batches per optimizer step. None leaves it to the Accelerator's argument and the environment."""
    adjust_scheduler: bool = True
    """Has no effect: a prepared scheduler never steps on micro-batches without an optimizer step."""
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader closes the window, however many micro-batches it has."""
    sync_each_batch: bool = False
    """Reduce gradients after every micro-batch: more messages, less memory under FSDP."""


@dataclass
class DataLoaderConfiguration:
    """Configure how prepared data loaders divide their data among the processes."""

    split_batches: bool = False
    """Whether a loader's batch size is that of all processes together. Each process then gets a part of every batch."""
    dispatch_batches: bool | None = None
    """Whether the main process reads all data and sends the others their parts. None: only for iterable data."""
    even_batches: bool = True
    """Whether the last round is filled up with samples of the beginning, so that all ranks take equally many steps."""
    use_seedable_sampler: bool = False
    """Whether the shuffled order depends on seed and epoch alone, and not on torch's generator."""
    data_seed: int | None = None
    """Seed of the seedable and the constant-memory order; None takes the seed of torch's generator on rank 0."""
    non_blocking: bool = False
    """Whether batches are copied to the device asynchronously. It needs `pin_memory=True` in the loader."""
    use_stateful_dataloader: bool = False
    """Whether a prepared loader is a `StatefulDataLoader` of torchdata too, with a state of that form."""
    constant_memory_shuffle: bool = False
    """Shuffle by a function of (seed, epoch, position) instead of a permutation kept in memory; for huge data sets."""
    order: str | None = None
    """Whose order shuffled samples have on several processes: that of "one-process" with the same seed, or that of
    "accelerate-1", which is 1.x on as many processes. None leaves it to the environment, and that to "one-process"."""


@dataclass
class ProjectConfiguration:
    """Configure where a run writes its files."""

    project_dir: str | None = None
    """Folder of the run, or a URL that fsspec opens. Automatic checkpoints are in `checkpoints/` below it."""
    logging_dir: str | None = None
    """Folder of the trackers; by default `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Whether `save_state()` chooses the name: `checkpoints/checkpoint_<iteration>`."""
    total_limit: int | None = None
    """How many automatic checkpoints are kept, at least one. The oldest is deleted once a new one is committed."""
    iteration: int = 0
    """Number of the next automatic checkpoint. It is always above the highest one in the folder."""
    save_on_each_node: bool = False
    """Whether every host writes its own files. Use it where hosts share no file system."""

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project directory, and the logging directory where none was given."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
