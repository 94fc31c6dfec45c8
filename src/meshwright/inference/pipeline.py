"""`prepare_pippy`: split a model that is too large for one device into pipeline stages for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.plugins.parallelism import PipelineConfig
from ..state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Split a model into as many stages as there are processes, and keep the stage of this rank on its device.

    All ranks then call the model with the same inputs, whose micro-batches (`num_chunks`, by default one per rank)
    pass through the stages. The last rank gets the outputs, or with `gather_output` all ranks do.
    """
    state = PartialState()
    if state.num_processes == 1:
        return model.to(state.device)
    from ..parallel.pipeline.cutting import partition_model, stage_starts
    from ..parallel.pipeline.schedules import Pipeline
    from ..parallel.pipeline.stages import StageView, prune_to_stages
    from ..parallel.pipeline.tracing import MetaModel, partition_by_use

    class InferencePipeline(Pipeline):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = self.evaluate(*args, **kwargs)
            return self.broadcast_from_last(outputs) if gather_output else outputs

    split_at = None if split_points is None or isinstance(split_points, str) else list(split_points)
    size, rank = state.num_processes, state.process_index
    starts = stage_starts(model, split_at, size, f"prepare_pippy on {size} processes", no_split_module_classes or ())
    example = (tuple(example_args or ()), dict(example_kwargs or {}))
    partition = partition_by_use(model, starts, *example) if any(example) else partition_model(model, starts)
    meta_model = MetaModel(model, partition, state.device)
    prune_to_stages(model, partition, meta_model, [rank])
    with torch.no_grad():
        model.to(state.device)
    view = StageView(model, partition, meta_model, rank)
    view.register_entry_hook()
    config = PipelineConfig(schedule="gpipe", microbatches=num_chunks or size)
    group = dist.group.WORLD
    assert group is not None
    model.forward = InferencePipeline([view], partition, meta_model, config, group, state.device)
    model.hf_split_points = starts  # type: ignore[assignment]
    return model
