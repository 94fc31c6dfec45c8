"""Run the stages of one model by torch's pipeline schedules, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ...config.plugins.parallelism import PipelineConfig
from ...errors.callers import warn
from ...runtime.collectives.nested import TensorInformation, leaves, named_leaves, recursively_apply, tensors_of
from ..base import Batch
from ..modules.dtensors import whole
from ..modules.means import divisors_of, is_sum
from .cutting import CannotCutError, Partition, require_use_in_own_stage
from .stages import StageView
from .tracing import ForwardTrace, MetaModel, StageBoundary

_SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
_MAX_PLANS, _MAX_TRACES = 8, 256
"""A plan holds receive buffers and is cheap to make; a trace holds little and costs a forward pass."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Pipeline:
    """The stages of one model on this process; it replaces the forward of the user's model."""

    def __init__(
        self,
        views: list[StageView],
        partition: Partition,
        meta_model: MetaModel,
        config: PipelineConfig,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.views = views
        self.reduces = True
        """Whether the gradients of the next batch are averaged over data-parallel ranks."""
        self.config = config
        self.group = group
        self.device = device
        self.microbatches = config.microbatches_for(group.size())
        self._partition = partition
        self._meta_model = meta_model
        self.names = list(meta_model.model.state_dict())
        """The names in the full state dict, in its order."""
        self._plans: dict[Any, _ScheduledStages] = {}
        self._traces: dict[Any, ForwardTrace] = {}
        self._compares_means = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs on every rank of the pipeline; for evaluation only."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "This model is cut into the stages of a pipeline, so that calling it gives nothing to compute a loss "
                "from. To train: loss = accelerator.forward_backward(model, x, target=y, loss_fn=loss_fn). To "
                "evaluate: with torch.no_grad(): outputs = model(x)."
            )
        return self.broadcast_from_last(self.evaluate(*args, **kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs on the last rank of the pipeline, and None on the others."""
        rows = _rows((args, kwargs))
        parts = self.microbatches if rows % self.microbatches == 0 else 1
        outputs: list[Any] = []
        with torch.no_grad():
            calls = _cut((args, kwargs), rows, parts)
            self._run(calls, lambda index, output: outputs.append(output), training=False)
        return _merged(outputs, rows // parts) if outputs else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise: a copy of one process's stages could not run."""
        raise TypeError(
            "A model that is cut into the stages of a pipeline cannot be copied or pickled: copy its state_dict()."
        )

    def train(self, batch: Batch, share: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the gradients of a batch and return its mean loss on every rank of the pipeline."""
        call = (batch.args, batch.kwargs)
        rows = _rows(call)
        self._require_equal_parts(rows)
        calls = _cut(call, rows, self.microbatches)
        targets = _cut(batch.target, rows, self.microbatches)
        losses: list[Tensor] = []
        divisors: list[list[Any]] = []
        sums: list[bool] = []
        weight = 1 / len(calls) if batch.num_items is None else 1.0

        def loss_of(index: int, outputs: Any) -> Tensor:
            loss = batch.loss_of(outputs, targets[index])
            if batch.num_items is None and self._compares_means:
                divisors.append(divisors_of(loss))
                sums.append(is_sum(loss))
            losses.append(whole(loss.detach()))
            return share(loss) * weight

        self._run(calls, loss_of, training=True)
        self._warn_of_means(divisors, any(sums))
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        mean = (total * weight if batch.num_items is None else total / batch.num_items).to(self.device, torch.float32)
        dist.broadcast(mean, group=self.group, group_src=self.group.size() - 1)
        return mean

    def _warn_of_means(self, divisors: list[list[Any]], sums: bool) -> None:
        """Warn once, at the script's line, if the mean over micro-batches is not the loss of the batch."""
        counts = sorted({tuple(float(whole(divisor)) for divisor in found) for found in divisors})
        if len(counts) < 2 and not sums:
            return
        self._compares_means = False
        fault = (
            f"a sum, and a pipeline takes the mean over the {self.microbatches} micro-batches"
            if sums
            else f"a mean over {counts[0][0]:g} items in one micro-batch and over {counts[-1][0]:g} in another, and a "
            "pipeline gives micro-batches the same weight"
        )
        warn(
            f"The loss is {fault}: gradients are not those of the whole batch. Give the sum and the number of items: "
            "accelerator.forward_backward(model, ..., loss_fn=<sum over the items>, num_items=<items of the batch>)."
        )

    def _require_equal_parts(self, rows: int) -> None:
        parts = self.microbatches
        if rows % parts:
            fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise ValueError(
                f"A batch of {rows} samples cannot be cut into {parts} equal micro-batches. PipelineConfig("
                f"microbatches=...) could be {fit}; or give every process a multiple of {parts} samples, and the data "
                "loader drop_last=True."
            )

    # --- the run ----------------------------------------------------------------------------------------------------

    def _run(self, calls: list[Call], finish: Callable[[int, Any], Any], *, training: bool) -> None:
        for view in self.views:
            view.sync_from_model()
        plan = self._plan(calls, training)
        plan.bind_boundaries()
        for stage in plan.stages:
            stage.calls, stage.reduces = calls, self.reduces
        plan.finish = finish
        numbers = torch.arange(
            len(calls)
        )  # the schedule splits and passes these; a stage looks up its inputs by number
        try:
            plan.schedule.step(numbers=numbers, target=numbers if training else None, return_outputs=False)
        finally:
            plan.release()
        self.views[-1].sync_to_model()

    def _plan(self, calls: list[Call], training: bool) -> _ScheduledStages:
        """Return the cached stages and schedule for micro-batches of this shape."""
        form = (self.views[0].module.training, *(_shape_key(name, leaf) for name, leaf in named_leaves(calls[0])))
        key = (training, len(calls), form)
        if key not in self._plans:
            _evict_oldest(self._plans, _MAX_PLANS)
            self._plans[key] = _ScheduledStages(self, self._trace(form, calls[0]), len(calls), training)
        return self._plans[key]

    def _trace(self, form: Any, call: Call) -> ForwardTrace:
        if form not in self._traces:
            _evict_oldest(self._traces, _MAX_TRACES)
            trace = self._meta_model.trace(*call, training=self.views[0].module.training)
            require_use_in_own_stage(self._partition, trace.uses)
            if trace.changes and len(self.views) > 1:
                raise CannotCutError(
                    f"The forward pass changes {', '.join(trace.changes)}, and a process with {len(self.views)} "
                    "stages would change it as many times. Use a schedule with one stage on every process: "
                    'PipelineConfig(schedule="1f1b").'
                )
            self._traces[form] = trace
        return self._traces[form]

    def broadcast_from_last(self, outputs: Any) -> Any:
        """Broadcast the outputs of the last rank to every rank of the pipeline."""
        last = self.group.size() - 1
        forms: list[Any] = [recursively_apply(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), outputs)]
        dist.broadcast_object_list(forms, group=self.group, group_src=last)
        mine = iter(tensors_of(outputs))

        def share(form: TensorInformation) -> Tensor:
            own = next(mine, None)
            leaf = torch.empty(form.shape, dtype=form.dtype, device=self.device) if own is None else own.contiguous()
            dist.broadcast(leaf, group=self.group, group_src=last)
            return leaf

        return recursively_apply(share, forms[0], test_type=lambda leaf: isinstance(leaf, TensorInformation))


class _ScheduledStages:
    """torch's stages and schedule for micro-batches of one shape."""

    def __init__(self, pipeline: Pipeline, trace: ForwardTrace, parts: int, training: bool) -> None:
        self.finish: Callable[[int, Any], Any] | None = None
        self.stages = [
            _Stage(
                view,
                trace,
                group=pipeline.group,
                device=pipeline.device,
                finish=None if training else self._finish,
            )
            for view in pipeline.views
        ]
        name = pipeline.config.schedule
        kind = _SCHEDULES["gpipe" if name == "1f1b" and not training else name]
        self._last = pipeline.views[-1]
        self.schedule = kind(
            self.stages if name == "interleaved" else self.stages[0],
            n_microbatches=parts,
            loss_fn=self._finish if training else None,
            scale_grads=False,
        )

    def bind_boundaries(self) -> None:
        """Set the boundaries of this plan on the stage views."""
        for stage in self.stages:
            stage.view.input_boundary, stage.view.output_boundary = stage.input_boundary, stage.output_boundary

    def _finish(self, tensors: tuple[Tensor, ...], number: Tensor) -> Any:
        """Pass the last stage's outputs, in the model's own structure, to the callback."""
        assert self.finish is not None
        given = iter(tensors)
        return self.finish(int(number), recursively_apply(lambda _: next(given), self._last.output))

    def release(self) -> None:
        """Release the references to the batch."""
        self.finish = None
        self._last.output = None
        for stage in self.stages:
            stage.calls = []


class _Stage(PipelineStage):
    """torch's stage; it looks up the model's inputs by micro-batch number, and reduces gradients only if asked."""

    def __init__(
        self,
        view: StageView,
        trace: ForwardTrace,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        finish: Callable[..., Any] | None,
    ) -> None:
        self.view = view
        self.calls: list[Call] = []
        self.reduces = True
        self._finish = finish
        self.input_boundary = trace.boundaries[view.index - 1] if view.index else StageBoundary()
        self.output_boundary = StageBoundary() if view.is_last else trace.boundaries[view.index]
        super().__init__(
            view.module,
            view.index,
            len(trace.boundaries) + 1,
            device,
            input_args=self.input_boundary.examples(),
            output_args=self.output_boundary.examples(),
            group=group,
        )

    def forward_maybe_with_nosync(self, *received: Tensor, numbers: Tensor) -> Any:
        """Run the stage on its received tensors and its micro-batch of the model's inputs."""
        outputs = self.submod(received, *self.calls[int(numbers)])
        if not self.is_last:
            return tuple(
                _sendable(leaf, dtype, self.has_backward)
                for leaf, (_, dtype) in zip(outputs, self.output_boundary.forms.values(), strict=True)
            )
        if self._finish is not None:
            self._finish(outputs, numbers)
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, and free its graph.

        torch's schedule keeps the losses until its end, and with each of them what custom functions hold in their
        context, such as the probabilities of a fused cross-entropy.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward and not loss._is_view():
            loss.detach_()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send nothing from the last stage, whatever the model returns."""
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep the gradients: shapes are known without a trial run, and gradients may be accumulating."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Average gradients over data-parallel ranks, unless they still accumulate or there are none."""
        if self.has_backward and self.reduces:
            super().perform_reduce_grad(grad_scale_factor)
        elif isinstance(self.submod, FSDPModule):
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _sendable(tensor: Tensor, dtype: torch.dtype, trains: bool) -> Tensor:
    """Return a tensor as the next stage expects it. Behind frozen parameters the backward pass ends in it."""
    tensor = tensor.to(dtype).contiguous()
    if trains and dtype.is_floating_point and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor


def _rows(call: Any) -> int:
    """Return the batch size: the length of the first tensor with a dimension."""
    for leaf in tensors_of(call):
        if leaf.dim():
            return len(leaf)
    raise ValueError("A pipeline cuts batches into micro-batches, and the model was given no tensor to cut.")


def _cut(data: Any, rows: int, parts: int) -> list[Any]:
    """Split every tensor with as many rows as the batch; anything else is part of every micro-batch."""
    size = rows // parts

    def part(number: int) -> Any:
        def cut(leaf: Tensor) -> Tensor:
            return leaf.narrow(0, number * size, size) if leaf.dim() and len(leaf) == rows else leaf

        return recursively_apply(cut, data)

    return [part(number) for number in range(parts)]


def _merged(outputs: list[Any], size: int) -> Any:
    """Merge the outputs of micro-batches: rows are concatenated, scalars averaged."""
    if len(outputs) == 1:
        return outputs[0]
    parts = zip(*(leaves(output) for output in outputs), strict=True)

    def merged(leaf: Any) -> Any:
        own = next(parts)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0:
            return torch.stack(own).mean() if leaf.is_floating_point() else leaf
        return torch.cat(own) if len(leaf) == size else leaf

    return recursively_apply(merged, outputs[0], test_type=_is_leaf)


def _is_leaf(data: Any) -> bool:
    return leaves(data) == [data] if not isinstance(data, Tensor) else True


def _evict_oldest(cache: dict[Any, Any], most: int) -> None:
    if len(cache) >= most:
        cache.pop(next(iter(cache)))


def _shape_key(name: str, leaf: Any) -> Any:
    """Return the cache key of an input: what determines the shapes of activations."""
    if isinstance(leaf, Tensor):
        return (name, leaf.shape, leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return (name, type(leaf))
    return (name, leaf)


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline of a model, or None."""
    attributes = vars(getattr(model, "_orig_mod", model))
    for name in ("forward", "_original_forward"):  # the latter if a second Accelerator wrapped it in autocast
        found = attributes.get(name)
        if isinstance(found, Pipeline):
            return found
    return None
