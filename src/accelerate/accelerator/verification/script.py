"""Record a script: on the mesh, or as the one process that the mesh is compared with.

`accelerate verify-parallel` runs a script in three roles. On the mesh, every rank records its own part. One process
then does the work of all data ranks: batch i of the script's loader belongs to data rank i % n, so that n micro-batches
in a row, accumulated, are one step of n ranks. A second such run adds in another order, which measures rounding.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config.environment import VERIFY_FOLDER, read
from ...config.plugins.compilation import TorchDynamoPlugin
from ...config.plugins.handlers import GradientAccumulationPlugin
from ...config.settings import TrainingSettings
from ...errors import UnsupportedSettingError
from ...parallel.modules.dtensors import whole
from .recording.dropout import WithoutDropout
from .recording.recorder import Recorder
from .recording.rounding import OtherOrderOfSummation

ROLE = "ACCELERATE_VERIFY_ROLE"
STEPS = "ACCELERATE_VERIFY_STEPS"
DATA_RANKS = "ACCELERATE_VERIFY_DATA_RANKS"
PASSES = "ACCELERATE_VERIFY_PASSES"
MESH, ONE_PROCESS, REORDERED = "mesh", "one_process", "reordered"


def adapted(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of a verified run: fp32, not compiled, and for the one process without a mesh."""
    if settings.deepspeed is not None:
        raise UnsupportedSettingError(
            "accelerate verify-parallel with DeepSpeed",
            "its engine does not show the gradients of a step.",
            "Verify the script with fsdp_plugin.",
        )
    settings = replace(settings, mixed_precision="no", compilation=TorchDynamoPlugin(backend="no"))
    if read(ROLE) == MESH:
        return settings
    plugin = settings.gradient_accumulation
    fields = plugin.to_dict() | {"num_steps": (plugin.num_steps or 1) * int(read(DATA_RANKS) or 1)}
    accumulation = GradientAccumulationPlugin(**fields)
    return replace(settings, sharding=None, parallelism=None, megatron=None, gradient_accumulation=accumulation)


def record(accelerator: Any) -> None:
    """Record what a script does with an Accelerator; a second one of the same process is recorded with the first."""
    global _script
    if _script is None:
        _script = Script(accelerator)
    _script.attach(accelerator)


def watch_clipping() -> None:
    """Record the norm that torch's own clipping returns; it does nothing while gradients still accumulate."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, _watched(getattr(torch.nn.utils, name)))


def _watched(plain: Callable[..., Any]) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if _script is None else _script.clip(plain, *args, **kwargs)

    return clip


class Script:
    """A script in one of the three roles: what it calls on its Accelerator passes through here."""

    def __init__(self, accelerator: Any) -> None:
        if accelerator.split_batches and accelerator.strategy.num_data_ranks > 1:
            raise UnsupportedSettingError(
                "accelerate verify-parallel with split_batches=True",
                "one process would have to cut every batch as the data ranks do.",
                "Verify the script with split_batches=False and the batch size of one process.",
            )
        self.recorder = Recorder.of_rank(accelerator.strategy, self._after_step)
        self._folder = Path(read(VERIFY_FOLDER) or ".")
        self._is_mesh = read(ROLE) == MESH
        self._data_ranks = int(read(DATA_RANKS) or 1)
        self._last = int(read(STEPS) or 1)
        self._passes = [int(count) for count in (read(PASSES) or "").split(",") if count]
        """For each step of the mesh, the backward passes of one data rank."""
        self._gradient_state = accelerator.gradient_state
        self._uses_accumulate = False
        self._ended = False
        if read(ROLE) == REORDERED:
            OtherOrderOfSummation().__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
        WithoutDropout(self.recorder.note_dropout).__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
        atexit.register(self._end)

    def attach(self, accelerator: Any) -> None:
        """Stand between the script and an Accelerator."""
        methods: dict[str, Any] = {
            "_prepare_bundle": self._prepare_bundle,
            "prepare_scheduler": self._prepare_scheduler,
            "accumulate": self._accumulate,
            "backward": self._backward,
            "forward_backward": self._forward_backward,
            "clip_grad_norm_": self._clip_grad_norm,
            "maybe_context_parallel": self._maybe_context_parallel,
        }
        for name, method in methods.items():
            setattr(accelerator, name, _bound(method, accelerator, getattr(accelerator, name)))

    def clip(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clip complete gradients, and record their norm."""
        if not self._gradient_state.sync_gradients:
            return torch.zeros(())
        norm = plain(*args, **kwargs)
        if isinstance(norm, Tensor):
            self.recorder.step.norm = float(whole(norm))
        return norm

    def _prepare_bundle(self, accelerator: Any, plain: Any, models: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for model in models:
            model.float()
        bundle = plain(models, *args, **kwargs)
        for model in bundle.models:
            self.recorder.watch_model(model)
        for optimizer in bundle.optimizers:
            self.recorder.watch_optimizer(optimizer)
        return bundle

    def _prepare_scheduler(self, accelerator: Any, plain: Any, scheduler: Any) -> Any:
        prepared = plain(scheduler)
        if not self._is_mesh and hasattr(prepared, "batches_per_step"):
            prepared.batches_per_step = self._data_ranks
        return prepared

    def _accumulate(self, accelerator: Any, plain: Any, *models: nn.Module) -> Any:
        self._uses_accumulate = True
        return plain(*models)

    def _backward(self, accelerator: Any, plain: Any, loss: Tensor, **kwargs: Any) -> None:
        self._begin_pass(accelerator)
        with self.recorder.during_backward():
            plain(loss, **kwargs)
        self._end_pass(accelerator, loss, is_sum=kwargs.get("num_items") is not None)

    def _forward_backward(self, accelerator: Any, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
        passes = len(self.recorder.step.losses)
        if not accelerator.strategy.holds_whole_models:  # a pipeline does not call `backward`
            self._begin_pass(accelerator)
        loss: Tensor = plain(*args, **kwargs)
        step = self.recorder.step
        if len(step.losses) == passes:
            self._end_pass(accelerator, loss, is_sum=False)
        else:
            step.losses[-1], step.sums[-1] = float(whole(loss.detach())), False
        return loss

    def _begin_pass(self, accelerator: Any) -> None:
        """On the one process, decide whether a step follows this backward pass, unless `accumulate` has."""
        if self._is_mesh or self._uses_accumulate or self._data_ranks == 1:
            return
        recorder = self.recorder
        step = min(len(recorder.recording.steps), len(self._passes) - 1)
        per_step = self._passes[step] * self._data_ranks
        accelerator.gradient_state.sync_gradients = (len(recorder.step.losses) + 1) % per_step == 0

    def _end_pass(self, accelerator: Any, loss: Tensor, *, is_sum: bool) -> None:
        is_last = accelerator.gradient_state.sync_gradients
        if is_last:
            accelerator.strategy.complete_gradients()
        self.recorder.note_pass(loss, is_sum=is_sum, is_last=is_last)

    def _clip_grad_norm(self, accelerator: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        return self.clip(plain, *args, **kwargs)

    @contextmanager
    def _maybe_context_parallel(
        self,
        accelerator: Any,
        plain: Any,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[Any]:
        with recording_positions(
            self.recorder, plain, buffers or [], buffer_seq_dims or [], no_restore_buffers
        ) as value:
            yield value

    def _after_step(self) -> None:
        if len(self.recorder.recording.steps) < self._last:
            return
        self._end()
        if dist.is_available() and dist.is_initialized():
            with suppress(Exception):
                dist.barrier()  # a rank that leaves early would cut off the others' last collective
        os._exit(0)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.recorder.recording.save(self._folder)


_script: Script | None = None


@contextmanager
def recording_positions(
    recorder: Recorder, plain: Any, buffers: list[Tensor], dims: list[int], no_restore: set[Tensor] | None
) -> Iterator[Any]:
    """Shard sequences, and record which positions stay on this process."""
    if not buffers:
        with plain(buffers, dims, no_restore) as value:
            yield value
        return
    length = buffers[0].shape[dims[0]]
    positions = torch.arange(length, device=buffers[0].device)
    with plain([*buffers, positions], [*dims, 0], no_restore) as value:
        recorder.positions = positions.detach().cpu().clone() if len(positions) < length else None
        try:
            yield value
        finally:
            recorder.positions = None


def _bound(method: Callable[..., Any], accelerator: Any, plain: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(accelerator, plain, *args, **kwargs)
