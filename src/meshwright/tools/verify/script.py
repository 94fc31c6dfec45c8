"""Record a script: on the mesh, or alone, as one process for each data rank of the mesh (`data_rank`).

`meshwright check --mesh` runs a script in three roles. On the mesh, every rank records its own part. Then the script
runs without a mesh, and there again with another order of summation, which measures rounding.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.combinations import Feature, require_combination
from ...config.environment import VERIFY_FOLDER, read
from ...config.plugins.compilation import TorchDynamoPlugin
from ...config.settings import TrainingSettings
from ...parallel.base import Strategy
from ...parallel.modules.dtensors import whole
from ...program import program_name
from .data_rank import Averaging, OneDataRank, group_of
from .recording.call_order import CallOrder
from .recording.dropout import WithoutDropout
from .recording.recorder import StepRecorder
from .recording.rounding import OtherOrderOfSummation

ROLE = "MESHWRIGHT_VERIFY_ROLE"
STEPS = "MESHWRIGHT_VERIFY_STEPS"
DATA_RANKS = "MESHWRIGHT_VERIFY_DATA_RANKS"
DATA_RANK = "MESHWRIGHT_VERIFY_DATA_RANK"
MESH, ONE_PROCESS, REORDERED = "mesh", "one_process", "reordered"


def adapted(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of a verified run: fp32, not compiled, and for the one process without a mesh."""
    require_combination({Feature.CHECK_MESH: f"{program_name()} check --mesh"} | settings.features())
    settings = replace(settings, mixed_precision="no", compilation=TorchDynamoPlugin(backend="no"))
    if read(ROLE) == MESH:
        return settings
    return replace(settings, sharding=None, parallelism=None, megatron=None, offload=None)


def adapted_strategy(strategy: Strategy) -> Strategy:
    """Return the strategy of a verified run: without a mesh, the work of one data rank."""
    data_ranks = int(read(DATA_RANKS) or 1)
    if read(ROLE) == MESH or data_ranks == 1:
        return strategy
    return OneDataRank(strategy.runtime, int(read(DATA_RANK) or 0), data_ranks, _group_of_data_ranks(data_ranks))


@cache
def _group_of_data_ranks(data_ranks: int) -> Any:
    return group_of(Path(read(VERIFY_FOLDER) or "."), int(read(DATA_RANK) or 0), data_ranks)


def record(accelerator: Any) -> None:
    """Record what a script does with an Accelerator; a second one of the same process is recorded with the first."""
    global _script
    if _script is None:
        _script = VerifiedScript(accelerator)
    _script.attach(accelerator)


def watch_clipping() -> None:
    """Record the norm that torch's own clipping returns; it does nothing while gradients still accumulate."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(torch.nn.utils, name, _watched(getattr(torch.nn.utils, name)))


def _watched(plain: Callable[..., Any]) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if _script is None else _script.clip(plain, *args, **kwargs)

    return clip


class VerifiedScript:
    """A script in one of the three roles: what it calls on its Accelerator passes through here."""

    def __init__(self, accelerator: Any) -> None:
        self.recorder = StepRecorder.of_rank(accelerator.strategy, self._after_step)
        self._folder = Path(read(VERIFY_FOLDER) or ".")
        strategy, runtime = accelerator.strategy, accelerator.state._runtime
        is_alone = isinstance(strategy, OneDataRank)
        if is_alone:
            self.recorder.recording.rank = strategy.data_rank
        num_ranks = strategy.num_data_ranks if is_alone else runtime.num_processes
        self._calls = CallOrder(self._folder, self.recorder.recording.rank, num_ranks)
        self._last = int(read(STEPS) or 1)
        self._gradient_state = accelerator.gradient_state
        self._ended = False
        if read(ROLE) == REORDERED:
            OtherOrderOfSummation().__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
        WithoutDropout(self.recorder.note_dropout).__enter__()  # type: ignore[no-untyped-call]  # for the rest of the process
        if is_alone:
            averaging = Averaging(strategy.gradient_group, strategy.num_gradient_shares, self.recorder.parameters)
            averaging.share_token_counts()
        atexit.register(self._end)

    def attach(self, accelerator: Any) -> None:
        """Stand between the script and an Accelerator."""
        methods: dict[str, Any] = {
            "_prepare_bundle": self._prepare_bundle,
            "backward": self._backward,
            "forward_backward": self._forward_backward,
            "clip_grad_norm_": self._clip_grad_norm,
            "maybe_context_parallel": self._maybe_context_parallel,
        }
        for name, method in methods.items():
            setattr(accelerator, name, _bound(method, accelerator, getattr(accelerator, name)))
        if isinstance(accelerator.strategy, OneDataRank):
            accelerator.gather_for_metrics = _alone
            accelerator.dataloader_config = replace(accelerator.dataloader_config, dispatch_batches=False)

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

    def _backward(self, accelerator: Any, plain: Any, loss: Tensor, **kwargs: Any) -> None:
        self._calls.begin_pass()
        with self.recorder.during_backward():
            plain(loss, **kwargs)
        self._end_pass(accelerator, loss, is_sum=kwargs.get("num_items") is not None)

    def _forward_backward(self, accelerator: Any, plain: Any, *args: Any, **kwargs: Any) -> Tensor:
        passes = len(self.recorder.step.losses)
        if not accelerator.strategy.holds_whole_models:  # a pipeline does not call `backward`
            self._calls.begin_pass()
        loss: Tensor = plain(*args, **kwargs)
        step = self.recorder.step
        if len(step.losses) == passes:
            self._end_pass(accelerator, loss, is_sum=False)
        else:
            step.losses[-1], step.sums[-1] = float(whole(loss.detach())), False
        return loss

    def _end_pass(self, accelerator: Any, loss: Tensor, *, is_sum: bool) -> None:
        is_last = accelerator.gradient_state.sync_gradients
        if is_last:
            accelerator.strategy.complete_gradients()
        self.recorder.note_pass(loss, is_sum=is_sum, is_last=is_last)
        self.recorder.recording.passes_without_loader += not accelerator.gradient_state.in_dataloader

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
        self._calls.step()
        if len(self.recorder.recording.steps) < self._last:
            return
        self._end()
        self._calls.wait_for_others()  # a rank that leaves early would cut off the others' last collective
        os._exit(0)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.recorder.recording.save(self._folder)
            self._calls.end()


_script: VerifiedScript | None = None


@contextmanager
def recording_positions(
    recorder: StepRecorder, plain: Any, buffers: list[Tensor], dims: list[int], no_restore: set[Tensor] | None
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


def _alone(input_data: Any, use_gather_object: bool = False, **_: Any) -> Any:
    """Stand for `gather_for_metrics`: the results of this data rank."""
    return input_data


def _bound(method: Callable[..., Any], accelerator: Any, plain: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(accelerator, plain, *args, **kwargs)
