"""`Accelerator.verify_parallel`: compare a model on the ranks that are here with one process, inside of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
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
from .recording.recorder import Recorder
from .recording.rounding import OtherOrderOfSummation
from .script import recording_positions

Pass = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Arguments and keyword arguments of the model, and the target."""


def verify_model(
    accelerator: Any,
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None,
    make_optimizer: Callable[[Any], Optimizer],
    max_norm: float | None,
    sequence_dim: int | None,
) -> Comparison:
    """Train on the mesh and on this process alone, and compare. Collective; every rank returns the result."""
    ranks = accelerator.strategy.num_data_ranks
    if not batches or len(batches) % ranks:
        raise ValueError(
            f"verify_parallel was given {len(batches)} batches for {ranks} data ranks: each step needs one for each."
        )
    passes = [_pass_of(batch) for batch in batches]
    training = (make_model, passes, loss_fn, make_optimizer, max_norm)
    mesh = _on_mesh(accelerator, *training, sequence_dim)
    recordings: list[Any] = [None] * accelerator.num_processes
    if accelerator.num_processes > 1:
        dist.all_gather_object(recordings, mesh)
    else:
        recordings = [mesh]
    one = _on_one_process(accelerator, *training, reordered=False)
    reordered = _on_one_process(accelerator, *training, reordered=True)
    return compare(recordings, one, reordered)


def _pass_of(batch: Any) -> Pass:
    inputs, target = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    if isinstance(inputs, dict):
        return (), inputs, target
    return (tuple(inputs), {}, target) if isinstance(inputs, (tuple, list)) else ((inputs,), {}, target)


def _on_mesh(
    accelerator: Any,
    make_model: Any,
    passes: Sequence[Pass],
    loss_fn: Any,
    make_optimizer: Any,
    max_norm: float | None,
    sequence_dim: int | None,
) -> Recording:
    recorder = Recorder.of_rank(accelerator.strategy)
    ranks, rank = accelerator.strategy.num_data_ranks, accelerator.strategy.data_rank
    with WithoutDropout(recorder.note_dropout):
        set_seed(0)
        model: Any = make_model().float()
        plain_optimizer = make_optimizer(model.parameters())
        recorder.watch_optimizer(plain_optimizer)
        model, optimizer = accelerator.prepare(model, plain_optimizer)
        recorder.watch_model(model)
        for given in passes[rank::ranks]:
            args, kwargs, target = own = recursively_apply(torch.clone, given)
            cut = [] if sequence_dim is None else tensors_of(own)
            dims = [sequence_dim or 0] * len(cut)
            with recording_positions(recorder, accelerator.maybe_context_parallel, cut, dims, set(cut)):
                loss = accelerator.forward_backward(model, *args, target=target, loss_fn=loss_fn, **kwargs)
            accelerator.strategy.complete_gradients()
            recorder.note_pass(loss, is_sum=False, is_last=True)
            if max_norm is not None:
                recorder.step.norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            optimizer.zero_grad()
    return recorder.recording


def _on_one_process(
    accelerator: Any,
    make_model: Any,
    passes: Sequence[Pass],
    loss_fn: Any,
    make_optimizer: Any,
    max_norm: float | None,
    *,
    reordered: bool,
) -> Recording:
    ranks = accelerator.strategy.num_data_ranks
    recorder = Recorder(Recording(rank=0, sizes={}, coordinates={}, data_ranks=1, data_rank=0))
    with ExitStack() as stack:
        stack.enter_context(WithoutDropout(recorder.note_dropout))
        mode: Any = OtherOrderOfSummation() if reordered else nullcontext()  # type: ignore[no-untyped-call]
        stack.enter_context(mode)
        set_seed(0)
        model = make_model().float().to(accelerator.device)
        optimizer = make_optimizer(model.parameters())
        recorder.watch_optimizer(optimizer)
        recorder.watch_model(model)
        for number, (args, kwargs, target) in enumerate(passes, start=1):
            batch = Batch(args=args, kwargs=kwargs, target=target, loss_fn=loss_fn)
            loss = batch.loss_of(model(*args, **kwargs), target)
            with recorder.during_backward():
                (loss / ranks).backward()
            recorder.note_pass(loss, is_sum=False, is_last=number % ranks == 0)
            if number % ranks == 0:
                if max_norm is not None:
                    recorder.step.norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
                optimizer.step()
                optimizer.zero_grad()
    return recorder.recording
