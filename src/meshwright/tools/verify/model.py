"""`Accelerator.verify_parallel`: compare a model on the ranks that are here with one process, inside of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...parallel.base import Batch
from ...runtime.collectives.nested import recursively_apply, tensors_of
from ...runtime.loop.random import set_seed
from .comparing.comparison import Comparison, compare
from .recording.data import Recording
from .recording.dropout import WithoutDropout
from .recording.recorder import StepRecorder
from .recording.rounding import OtherOrderOfSummation
from .script import recording_positions


@dataclass(frozen=True)
class VerifiedTraining:
    """What is trained, as `Accelerator.verify_parallel` is given it."""

    make_model: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss_fn: Callable[..., Tensor] | None
    make_optimizer: Callable[[Any], Optimizer]
    max_norm: float | None
    sequence_dim: int | None

    def verify(self, accelerator: Any) -> Comparison:
        """Train on the mesh and on this process alone, and compare. Collective; every rank returns the result."""
        ranks = accelerator.strategy.num_data_ranks
        if not self.batches or len(self.batches) % ranks:
            raise ValueError(
                f"verify_parallel was given {len(self.batches)} batches for {ranks} data ranks: each step needs one "
                "for each."
            )
        recordings: list[Any] = [None] * accelerator.num_processes
        own = self._on_mesh(accelerator)
        if len(recordings) > 1:
            dist.all_gather_object(recordings, own)
        else:
            recordings = [own]
        one = self._on_one_process(ranks, accelerator.device, reordered=False).by_data_rank(ranks)
        reordered = self._on_one_process(ranks, accelerator.device, reordered=True).by_data_rank(ranks)
        return compare(recordings, one, reordered)

    def _on_mesh(self, accelerator: Any) -> Recording:
        recorder = StepRecorder.of_rank(accelerator.strategy)
        ranks, rank = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
        with WithoutDropout(recorder.note_dropout):
            plain, plain_optimizer = self._made(recorder)
            model, optimizer = accelerator.prepare(plain, plain_optimizer)
            recorder.watch_model(model)
            for batch in self.batches[rank::ranks]:
                args, kwargs, target = own = recursively_apply(torch.clone, _pass_of(batch))
                cut = [] if self.sequence_dim is None else tensors_of(own)
                dims = [self.sequence_dim or 0] * len(cut)
                with recording_positions(recorder, accelerator.maybe_context_parallel, cut, dims, set(cut)):
                    loss = accelerator.forward_backward(model, *args, target=target, loss_fn=self.loss_fn, **kwargs)
                accelerator.strategy.complete_gradients()
                recorder.note_pass(loss, is_sum=False, is_last=True)
                self._step(recorder, accelerator.clip_grad_norm_, model, optimizer)
        return recorder.recording

    def _on_one_process(self, ranks: int, device: torch.device, *, reordered: bool) -> Recording:
        recorder = StepRecorder(Recording(rank=0, sizes={}, coordinates={}, data_ranks=1, data_rank=0))
        summation: Any = OtherOrderOfSummation() if reordered else nullcontext()  # type: ignore[no-untyped-call]
        with WithoutDropout(recorder.note_dropout), summation:
            model, optimizer = self._made(recorder)
            model.to(device)
            recorder.watch_model(model)
            for number, batch in enumerate(self.batches, start=1):
                args, kwargs, target = _pass_of(batch)
                given = Batch(args=args, kwargs=kwargs, target=target, loss_fn=self.loss_fn)
                loss = given.loss_of(model(*args, **kwargs), target)
                with recorder.during_backward():
                    (loss / ranks).backward()  # type: ignore[no-untyped-call]
                recorder.note_pass(loss, is_sum=False, is_last=number % ranks == 0)
                if number % ranks == 0:
                    self._step(recorder, torch.nn.utils.clip_grad_norm_, model, optimizer)
        return recorder.recording

    def _made(self, recorder: StepRecorder) -> tuple[nn.Module, Optimizer]:
        """Make the model and its optimizer, the same every time."""
        set_seed(0)
        model = self.make_model().float()
        optimizer = self.make_optimizer(model.parameters())
        recorder.watch_optimizer(optimizer)
        return model, optimizer

    def _step(self, recorder: StepRecorder, clip: Callable[..., Tensor], model: nn.Module, optimizer: Any) -> None:
        if self.max_norm is not None:
            recorder.step.norm = float(clip(model.parameters(), self.max_norm))
        optimizer.step()
        optimizer.zero_grad()


def _pass_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments and keyword arguments of the model, and the target."""
    inputs, target = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    if isinstance(inputs, dict):
        return (), inputs, target
    return (tuple(inputs), {}, target) if isinstance(inputs, (tuple, list)) else ((inputs,), {}, target)
