"""Pipeline parallelism: every rank of the `pp` axis holds some of the layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...config.plugins.parallelism import PipelineConfig
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...errors import UnsupportedSettingError
from ...runtime import phases
from ...runtime.collectives.nested import TensorInformation
from ...runtime.group.mesh import Mesh
from ...runtime.group.runtime import Runtime
from ..base import Batch, Shares, params_of
from ..mesh.matrices.trial import require_each_alone
from ..mesh.sharded import MeshParallel, norm_of
from ..modules import materialising
from ..modules.dtensors import whole
from ..modules.spread import Layout
from ..modules.wrapping import units_of
from .cutting import Partition, blocks_of, parameters_of_other_stages, partition_model, stage_starts
from .schedules import Pipeline, pipeline_of
from .stages import StageView, prune_to_stages
from .tracing import MetaModel, partition_by_use

logger = logging.getLogger(__name__)


class PipelineParallel(MeshParallel):
    """Partition models into stages along the `pp` axis; the other axes apply to each stage."""

    holds_whole_models = False

    def __init__(self, runtime: Runtime, mesh: Mesh, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(runtime, mesh, plugin)
        self.config = mesh.config.pp_handler or PipelineConfig()
        self.size = mesh.size("pp")
        self.rank = mesh.axis("pp").get_local_rank()
        self.group: dist.ProcessGroup = mesh.axis("pp").get_group()
        self.config.microbatches_for(self.size)  # fail early
        self._to_place: set[int] = set()
        # Parameters of other ranks' stages: optimizers and lists made before `prepare` still hold them.
        self._other_stage_parameters: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()

    # --- prepare ----------------------------------------------------------------------------------------------------

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return False: stages are cut out of plain models."""
        return False

    def _place(self, model: nn.Module) -> None:
        """Defer the move: a rank moves only its own stages, which are known once the model is partitioned."""
        self._to_place.add(id(model))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Partition a model, keep this rank's stages, and distribute each of them over the other axes."""
        if pipeline_of(model) is not None:
            return model
        if materialising.has_no_weights(model):
            raise UnsupportedSettingError(
                "pp_size > 1 with a model on the meta device",
                "a stage cannot be given weights by the first process.",
                "Make the model on the host.",
            )
        place = id(model) in self._to_place
        self._to_place.discard(id(model))
        config = self.config
        if config.layers_per_stage is not None:
            config = config.fitted(len(blocks_of(model)), self.size)
        partition = self._make_partition(model, config)
        own = config.stages_of(self.rank, self.size)
        for param in parameters_of_other_stages(model, partition, own):
            self._other_stage_parameters[param] = True
        units = units_of(model, self.plugin)  # before pruning: a single remaining block is not a repeated one
        meta_model = MetaModel(model, partition, self.runtime.device)
        prune_to_stages(model, partition, meta_model, own)
        if place and self.mesh.sharding is None:
            self._move(model)
        views = [StageView(model, partition, meta_model, index) for index in own]
        for view in views:
            inside = set(view.module.modules())
            self._parallelize(view.module, self._steps_over([unit for unit in units if unit in inside]))
            view.write_back()
            view.register_entry_hook()
        vars(model).pop("_original_forward", None)
        model.forward = Pipeline(views, partition, meta_model, config, self.group, self.runtime.device)
        self._register_position_check(model)
        self._log_stages(model, partition, config)
        return model

    def _make_partition(self, model: nn.Module, config: PipelineConfig) -> Partition:
        per_rank = config.stages_per_rank or 1
        asked = f"pp_size={self.size}" + (f" with stages_per_rank={per_rank}" if per_rank > 1 else "")
        starts = stage_starts(model, config.split_at, self.size * per_rank, asked)
        example = config.example_inputs
        if example is None:
            return partition_model(model, starts)
        example = example() if callable(example) else example
        kwargs = dict(example) if isinstance(example, dict) else {}
        args = () if kwargs else tuple(example) if isinstance(example, (tuple, list)) else (example,)
        return partition_by_use(model, starts, args, kwargs)

    def _log_stages(self, model: nn.Module, partition: Partition, config: PipelineConfig) -> None:
        if self.runtime.is_main_process:
            count = config.microbatches_for(self.size)
            chosen = " (as many as there are stages)" if config.microbatches is None else ""
            logger.info(
                "%s is cut into %d stages, which begin with %s; batches are cut into %d micro-batches%s, which pass "
                "by the schedule %s.",
                type(model).__name__,
                partition.num_stages,
                ", ".join(["its inputs", *partition.starts]),
                count,
                chosen,
                config.schedule,
            )

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str:
        """Refuse: gradients of micro-batches add up."""
        return f"the gradients of the micro-batches of a pipeline (pp_size={self.size}) add up."

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only the parameters of this rank's stages in an optimizer; groups may become empty."""
        if self._other_stage_parameters:
            if any(param in self._other_stage_parameters for param in params_of(optimizer)):
                require_each_alone(optimizer)
            for group in optimizer.param_groups:
                group["params"] = [param for param in group["params"] if param not in self._other_stage_parameters]
            for param in [param for param in optimizer.state if param in self._other_stage_parameters]:
                del optimizer.state[param]
        super()._rebind(optimizer)

    def current(self, parameters: Iterable[Tensor] | Tensor) -> Iterable[Tensor] | Tensor:
        """Map parameters to their replacements, without those of other stages."""
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return super().current([param for param in given if param not in self._other_stage_parameters])

    # --- the step ---------------------------------------------------------------------------------------------------

    def forward_backward(self, model: nn.Module, batch: Batch, shares: Shares, backward: Callable[..., None]) -> Tensor:
        """Run the pipeline schedule on a batch, and return its mean loss on every rank of the pipeline."""
        pipeline = pipeline_of(model)
        if pipeline is None:
            return super().forward_backward(model, batch, shares, backward)
        if model in self._position_checks:
            self._position_checks[model].check(model, batch.args, batch.kwargs)
        with phases.during(phases.BACKWARD), shares as share:  # stages wait for each other throughout
            return pipeline.train(batch, share)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Skip gradient reduction inside the context."""
        return self._reducing(model, False)

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Reduce gradients again inside the context."""
        return self._reducing(model, True)

    def _reducing(self, model: nn.Module, reduces: bool) -> AbstractContextManager[object]:
        pipeline = pipeline_of(model)
        return nullcontext() if pipeline is None else _reducing(pipeline, reduces)

    def _total_norm(self, norms: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm over all stages."""
        own = norm_of(norms, norm_type).to(self.runtime.device, torch.float32)
        if math.isinf(norm_type):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.group)
            return own
        powers = own**norm_type
        dist.all_reduce(powers, group=self.group)
        return powers ** (1.0 / norm_type)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def saves_shards(self) -> bool:
        """Return True: every process saves its own stages."""
        return True

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Gather the states of all stages on the main process, one tensor at a time."""
        pipeline = pipeline_of(model)
        if pipeline is None:
            return super().full_state_dict(model)
        own = {name: _on_host(value) for name, value in model.state_dict().items()}
        members = dist.get_process_group_ranks(self.group)
        if 0 not in members:
            return {}
        contents: list[Any] = [None] * self.size
        forms = {name: TensorInformation(v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in own.items()}
        dist.all_gather_object(contents, forms, group=self.group)
        state = dict(own) if self.runtime.is_main_process else {}
        for member, content in zip(members[1:], contents[1:], strict=True):
            for name, form in content.items():
                if self.runtime.is_main_process:
                    state[name] = self._received(form, member)
                elif self.runtime.process_index == member and isinstance(form, TensorInformation):
                    dist.send(own[name].to(self.runtime.device), dst=0, group=self.group)
        return {name: state[name] for name in pipeline.names if name in state}

    def _received(self, form: Any, member: int) -> Any:
        if not isinstance(form, TensorInformation):
            return form
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.runtime.device)
        dist.recv(tensor, src=member, group=self.group)
        return tensor.cpu()


def _on_host(value: Any) -> Any:
    return whole(value).detach().cpu().contiguous() if isinstance(value, Tensor) else value


@contextmanager
def _reducing(pipeline: Pipeline, reduces: bool) -> Iterator[None]:
    before, pipeline.reduces = pipeline.reduces, reduces
    try:
        yield
    finally:
        pipeline.reduces = before
