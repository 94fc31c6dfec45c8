"""`Accelerator`: the one object a user holds. It delegates; it never asks which backend it is on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..config.combinations import Feature
from ..config.enums import DynamoBackend, FP8BackendType, RNGType
from ..config.environment import TRACE_FOLDER, VERIFY_FOLDER, read
from ..config.plugins.compilation import TorchDynamoPlugin
from ..config.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, Fp8Settings, MSAMPRecipeKwargs, TERecipeKwargs
from ..config.plugins.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from ..config.plugins.parallelism import ParallelismConfig as ParallelismConfig
from ..config.settings import TrainingSettings, resolve_data_order
from ..data.loaders.base import PreparedLoader
from ..data.loaders.shard import DataLoaderShard
from ..data.metrics import gather_results
from ..data.preparing import (
    SkipDataLoader,
    in_larger_batches,
    prepare_data_loader,
    samples_per_process,
    skip_first_batches,
)
from ..errors.callers import suggest_arguments, warn
from ..instruments import PROCESS, Instrument, Instruments
from ..logging import get_logger
from ..optimizer import (
    AcceleratedOptimizer,
    check_clipping,
    clip_gradients,
    lomo_optimizers,
    refuse_beside_lomo,
    refuse_offloaded_weights,
    start_early_steps,
    take_learning_rate,
    warn_of_foreign_optimizer,
)
from ..parallel.base import Batch, Bundle, Steps
from ..parallel.compilation import compiling
from ..parallel.mesh.fsdp2 import fsdp2_apply_ac, fsdp2_prepare_model
from ..parallel.modules.unwrapping import extract_model_from_parallel
from ..parallel.registry import features_of, strategy_for
from ..precision import precision_for
from ..precision.fp8 import convert_model_to_fp8_ao
from ..runtime.devices.memory import release_memory
from ..runtime.loop.gradient_state import GradientState
from ..scheduler import AcceleratedScheduler
from ..state import AcceleratorState, settings_of_first
from ..tools.fit.methods import FittingMethods
from .accumulation import window_of
from .arguments import (
    Handlers,
    compilation_in_code,
    instruments_of_run,
    one_of,
    placements_of,
    settings_of_run,
    strategy_of_run,
)
from .checkpoint_methods import CheckpointMethods
from .effects import effect
from .tracking_methods import TrackingMethods

if TYPE_CHECKING:
    from ..checkpoint.checkpointer import Checkpointer
    from ..tools.verify.comparing.comparison import Comparison
    from ..tracking.trackers import Trackers
    from ..weights.sleeping import Sleeping

logger = get_logger(__name__)

_unset: Any = object()


class Accelerator(CheckpointMethods, FittingMethods, TrackingMethods):
    """Take a PyTorch training loop to any number of processes.

    Make one, hand model, optimizer, data loaders and scheduler to `prepare`, and call `backward` for
    `loss.backward()`. The rest of the loop stays as it is. An argument that is left out comes from `meshwright launch`
    (by environment variables) where a flag exists for it, else it has its default. A second Accelerator in one process
    has the number format of the first one, and its compilation, sharding, mesh, DeepSpeed or offload, unless it is
    given its own.

    Args:
        device_placement: Whether `prepare` moves models and batches to the device of this process.
        split_batches: Whether a loader's batch size is that of all processes together. It is a field of
            `dataloader_config`; given here, it overrides that field.
        mixed_precision: The number format of forward passes: "no", "fp16", "bf16" or "fp8".
        gradient_accumulation_steps: Micro-batches per optimizer step, for loops that use `accumulate`.
        cpu: Whether to run on the CPU although there are accelerators.
        dataloader_config: How prepared loaders share out, order and copy their data.
        deepspeed_plugin: A `DeepSpeedPlugin`, which lets DeepSpeed run the training; or a dict of named ones.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`, which shards models over the processes.
        torch_tp_plugin: A `TorchTensorParallelPlugin`: the older form of `parallelism_config` with `tp_size`.
        megatron_lm_plugin: A `MegatronLMPlugin`, whose settings are translated to a mesh of torch's engines.
        rng_types: Generators that all processes set to the state of rank 0 when a loader begins: "torch", "cuda",
            "generator" (the loader's own), ... The default is "generator" alone.
        log_with: A tracker or a list of them: names such as "jsonl" or "wandb", "all", or objects of
            `GeneralTracker`.
        project_dir: Folder of the run, for checkpoints and logs. A `project_config` that has one takes precedence.
        project_config: Where the run keeps its files, and how many checkpoints.
        gradient_accumulation_plugin: Details of accumulation, the number of micro-batches included.
        step_scheduler_with_optimizer: Whether a prepared scheduler advances only with real optimizer steps, once per
            process. With False each `scheduler.step()` advances it once.
        kwargs_handlers: Arguments for what torch builds, at most one of each class: `AutocastKwargs`,
            `DistributedDataParallelKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`,
            `AORecipeKwargs`.
        dynamo_backend: Backend of `torch.compile`, such as "inductor". `dynamo_plugin` must then be left out.
        dynamo_plugin: How `prepare` compiles models.
        deepspeed_plugins: Several `DeepSpeedPlugin`s by name, for programs with several engines. `deepspeed_plugin`
            must then be left out.
        parallelism_config: A `ParallelismConfig`: how many processes copy, shard, split or cut the model.
        offload: Where to keep the blocks of a model that does not fit: "host", "disk", or an `OffloadConfig`.
        meter: Whether to measure the run: True, or a dict with the arguments of `meter`.
        instruments: What sees the loop: objects of classes derived from `Instrument`.
    """

    @suggest_arguments
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _unset,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        offload: Any = None,
        meter: bool | dict[str, Any] = False,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        handlers = Handlers(kwargs_handlers or ())
        self.autocast_handler = handlers.take(AutocastKwargs)
        self.scaler_handler = handlers.take(GradScalerKwargs)
        self.init_handler = handlers.take(InitProcessGroupKwargs)
        self.ddp_handler = handlers.take(DistributedDataParallelKwargs)
        self.profile_handler = handlers.take(ProfileKwargs)
        self.ao_recipe_handler = handlers.take(AORecipeKwargs)
        self.te_recipe_handler = handlers.take(TERecipeKwargs)
        self.msamp_recipe_handler = handlers.take(MSAMPRecipeKwargs)
        self.fp8_recipe_handler = handlers.take(FP8RecipeKwargs)
        handlers.refuse_rest()
        settings = TrainingSettings.from_arguments(
            mixed_precision=mixed_precision,
            inherited=settings_of_first(),
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugins=one_of(deepspeed_plugin, deepspeed_plugins),
            parallelism_config=parallelism_config,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            dynamo_plugin=compilation_in_code(dynamo_backend, dynamo_plugin),
            offload=offload,
        )
        self.settings = settings_of_run(settings)
        self.state = AcceleratorState(
            mixed_precision=self.settings.mixed_precision,
            cpu=cpu,
            dynamo_plugin=self.settings.compilation,
            deepspeed_plugin=self.settings.deepspeed,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=self.settings.megatron,
            _from_accelerator=True,
            **(self.init_handler.to_kwargs() if self.init_handler is not None else {}),
        )
        self.gradient_state = GradientState(self.settings.gradient_accumulation)
        self.instruments = self.gradient_state.instruments = Instruments(PROCESS)
        self.instruments.add(*instruments, *instruments_of_run())
        self.strategy = strategy_for(self.state._runtime, self.settings, self.ddp_handler)
        me = ref(self)
        self.strategy.steps = Steps(
            recompute=lambda model: fsdp2_apply_ac(me(), model), shard=lambda model: fsdp2_prepare_model(me(), model)
        )
        self.strategy = strategy_of_run(compiling(self.strategy, self.settings.compilation))
        self.state._describe(self.strategy, settings)
        self.precision = precision_for(
            self.settings.mixed_precision,
            self.state.device,
            self.autocast_handler or AutocastKwargs(),
            None if self.strategy.capabilities.owns_scaling else self.scaler_handler or GradScalerKwargs(),
            Fp8Settings.from_arguments(
                [self.ao_recipe_handler, self.te_recipe_handler, self.msamp_recipe_handler, self.fp8_recipe_handler]
            ),
        )
        self.native_amp = self.mixed_precision != "no"
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not _unset:
            self.dataloader_config.split_batches = split_batches
        self.rng_types = list(rng_types) if rng_types is not None else [RNGType.GENERATOR]
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(os.fspath(project_dir))
        self._trackers: Trackers | None = None
        if log_with is not None:
            from ..tracking.trackers import Trackers

            self._trackers = Trackers(log_with, self.logging_dir)
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self.window = window_of(self.gradient_state, self.strategy, self._models)
        self._checkpointer: Checkpointer | None = None
        self.flag_tensor: Tensor | None = None
        self._start_recovery()
        self._start_recording()
        self._start_meter(meter)
        self.instruments.attach(self)

    @property
    def features(self) -> dict[Feature, str]:
        """The features that are in use, as messages name them: rows of the page "What goes with what"."""
        return features_of(self.state._runtime, self.settings, self.ddp_handler)

    def _start_recording(self) -> None:
        """Let the verbs that look at a run stand between the script and this object; hardly any run has one."""
        if read(TRACE_FOLDER) is not None:
            self._trace_backward()
        if read(VERIFY_FOLDER) is not None:
            from ..tools.verify.script import record

            record(self)

    # --- prepare ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make torch objects ready for this run and return them in the order they came.

        Models, optimizers, data loaders and schedulers are recognised; anything else is returned as it is. What
        another Accelerator prepared is taken over: from now on it obeys this one.

        Args:
            *args: Objects in any order. Give a model and its optimizer in one call: sharding replaces the parameters,
                and the optimizer has to follow them.
            device_placement: One choice per object: move it to the device, do not, or None for the Accelerator's own
                setting.

        Returns:
            The prepared object, or a tuple where several were given.
        """
        args = tuple(self._adopt(arg) for arg in args)
        placements = placements_of(args, device_placement)
        result = list(args)
        models = _unprepared(args, _is_a(nn.Module))
        optimizers = _unprepared(args, _is_a(Optimizer))
        # A checkpoint numbers loaders in this order, so those that are prepared already keep their place.
        loaders = [i for i, arg in enumerate(args) if isinstance(arg, DataLoader)]
        schedulers = _unprepared(args, _is_scheduler)
        prepared = self._prepare_bundle(
            [args[i] for i in models],
            [args[i] for i in optimizers],
            [placements[i] for i in models],
            schedulers=[args[i] for i in schedulers],
            loaders=[args[i] for i in loaders],
        )
        for i, model in zip(models, prepared.models, strict=True):
            result[i] = model
        for i, optimizer in zip(optimizers, prepared.optimizers, strict=True):
            result[i] = self._wrap_optimizer(optimizer, placements[i])
        for i in loaders:
            result[i] = self.prepare_data_loader(args[i], placements[i])
            if prepared.models and result[i] is not args[i]:
                result[i].division = self.strategy.batch_division
        for i, scheduler in zip(schedulers, prepared.schedulers, strict=True):
            result[i] = self.prepare_scheduler(scheduler)
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place, cast and spread one model.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None takes the Accelerator's own setting.
            evaluation_mode: Whether it is not going to be trained. It is then not wrapped for averaging gradients.
        """
        model = self._adopt(model)
        if _is_prepared(model):
            return model
        return self._prepare_bundle([model], [], [device_placement], evaluation=evaluation_mode).models[0]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap one optimizer.

        Args:
            optimizer: The optimizer of a model that is prepared already.
            device_placement: Whether its state is moved to the device; None takes the Accelerator's own setting.
        """
        optimizer = self._adopt(optimizer)
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = self._prepare_bundle([], [optimizer], [])
        return self._wrap_optimizer(prepared.optimizers[0], device_placement)

    def deepspeed_ulysses_dl_adapter(self, dl: PreparedLoader, model: nn.Module) -> PreparedLoader:
        """Let a prepared loader divide its batches over the `sp` axis, as if `prepare` had been given both at once.

        Args:
            dl: A prepared loader of dictionaries with `input_ids`.
            model: The prepared model.
        """
        dl.division = self.strategy.batch_division
        return dl

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Give one data loader this process's share.

        Args:
            data_loader: A plain loader. One that is prepared is returned as it is.
            device_placement: Whether batches are moved to the device; None takes the Accelerator's own setting.
            slice_fn_for_dispatch: Cuts a process's part out of a batch that the main process read:
                `slice_fn(batch, slice, process_index=, num_processes=)`.
        """
        if isinstance(data_loader, PreparedLoader) and not isinstance(data_loader, SkipDataLoader):
            if data_loader not in self._dataloaders:
                data_loader.gradient_state = self.gradient_state
                self._dataloaders.append(data_loader)
            return data_loader
        config, megatron = self.dataloader_config, self.settings.megatron
        prepared = prepare_data_loader(
            data_loader if megatron is None else in_larger_batches(data_loader, megatron.num_micro_batches or 1),
            self.device,
            num_processes=self.strategy.num_data_ranks,
            process_index=self.strategy.data_rank,
            split_batches=config.split_batches,
            put_on_device=self._placement(device_placement),
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            constant_memory_shuffle=config.constant_memory_shuffle,
            order=resolve_data_order(config.order),
        )
        prepared.gradient_state = self.gradient_state
        prepared.group = self.strategy.data_group
        self.strategy.connect_loader(prepared)
        self._dataloaders.append(prepared)
        if megatron is not None:
            sizes = [loader.total_batch_size // loader.num_processes for loader in self._dataloaders]
            megatron.note_batch_sizes(sizes, self.strategy.num_data_ranks)
        for notify in self.instruments.loader_prepared:
            notify(self, prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Tie one scheduler to the steps of its optimizer, unless an engine advances it.

        Args:
            scheduler: The scheduler of an optimizer that is prepared already.
        """
        scheduler = self._adopt(scheduler)
        if _is_prepared(scheduler):
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        optimizers = [opt for opt in self._optimizers if opt.wraps(own)] or list(self._optimizers)
        for earlier in self._schedulers:
            if earlier.scheduler is scheduler and earlier.optimizers == optimizers:
                return earlier
        prepared = AcceleratedScheduler(
            scheduler,
            optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            batches_per_step=self.strategy.num_data_ranks,
        )
        prepared.gradient_state = self.gradient_state
        self._schedulers.append(prepared)
        return prepared

    def _adopt(self, obj: Any) -> Any:
        """Take what another Accelerator prepared out of its hands; return anything else as it is.

        Left there, it would obey that one's accumulation window, and fp16 losses scaled here would be unscaled nowhere.
        """
        if isinstance(obj, AcceleratedOptimizer) and obj not in self._optimizers:
            return obj.optimizer
        if isinstance(obj, AcceleratedScheduler) and obj not in self._schedulers:
            return obj.scheduler
        if isinstance(obj, nn.Module) and _is_prepared(obj):
            compiled = getattr(obj, "_orig_mod", obj)
            if obj not in self._models and compiled not in self._models:
                del compiled._is_accelerate_prepared
                return extract_model_from_parallel(obj, keep_fp32_wrapper=False)
        return obj

    def _prepare_bundle(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        placements: Sequence[bool | None],
        *,
        schedulers: Sequence[Any] = (),
        loaders: Sequence[DataLoader[Any]] = (),
        evaluation: bool = False,
    ) -> Bundle:
        refuse_offloaded_weights([*self._models, *models], optimizers)
        seen = self.instruments
        if seen.prepare_started:
            bundle = Bundle(models=models, optimizers=optimizers, schedulers=list(schedulers), evaluation=evaluation)
            for notify in seen.prepare_started:
                notify(self, bundle)
        layouts = []
        for model in models:
            self.verify_device_map(model)
            layouts.append(self.strategy.admit(model, evaluation=evaluation))
            if self.precision.fp8_backend != FP8BackendType.NO:
                layouts[-1].require_plain("mixed_precision='fp8'")
            self.precision.convert(model, convert_model_to_fp8_ao)
            self.precision.wrap_forward(model)
        bundle = self.strategy.prepare(
            Bundle(
                models=models,
                optimizers=optimizers,
                schedulers=list(schedulers),
                batch_sizes=[
                    size
                    for loader in [*self._dataloaders, *loaders]
                    if (size := samples_per_process(loader, self.strategy.num_data_ranks, self.split_batches))
                ],
                accumulation_steps=self.gradient_accumulation_steps,
                split_batches=self.split_batches,
                place_models=[
                    self._placement(place) and not hasattr(model, "hf_device_map") and not layout.stays
                    for model, place, layout in zip(models, placements, layouts, strict=True)
                ],
                evaluation=evaluation,
            )
        )
        for model in bundle.models:
            model._is_accelerate_prepared = True  # type: ignore[assignment]
            self._models.append(model)
        for notify in seen.prepare_ended:
            notify(self, bundle)
        return bundle

    def _wrap_optimizer(self, optimizer: Optimizer, device_placement: bool | None) -> AcceleratedOptimizer:
        wrapped = AcceleratedOptimizer(optimizer, self._placement(device_placement), self.precision.scaler)
        wrapped.gradient_state = self.gradient_state
        wrapped.transaction = self.strategy.transaction
        if not self.strategy.capabilities.owns_scaling:  # an engine keeps the gradients elsewhere
            wrapped.before_first_step = partial(warn_of_foreign_optimizer, models=self._models)
        if self.settings.megatron is not None and (max_norm := self.settings.megatron.max_norm) is not None:
            wrapped.before_step = partial(clip_gradients, max_norm=max_norm, clip=self.strategy.clip_grad_norm)
        start_early_steps(wrapped, self.strategy)
        self._compare_after_steps_of(wrapped)
        self._optimizers.append(wrapped)
        return wrapped

    def _placement(self, choice: bool | None) -> bool:
        return self.device_placement if choice is None else choice

    def verify_device_map(self, model: nn.Module) -> bool:
        """Refuse a model that a device map spreads over several devices, where every process needs a whole copy.

        Args:
            model: The model.
        """
        spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        if spread and self.use_distributed:
            raise ValueError(
                f"Rank {self.process_index}: You can't train a model that has been loaded with `device_map='auto'` in "
                f"any distributed mode: its map spreads it over several devices, and {self.num_processes} processes "
                "each need a whole copy. Load it without device_map."
            )
        return spread

    # --- the step -------------------------------------------------------------------------------------------------

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, dataloader: PreparedLoader | None = None
    ) -> Any:
        """Gather what the current batch produced, without the samples that only filled up the last batch.

        Anything that is not made of tensors is gathered as objects: each process brings a list.

        Args:
            input_data: A tensor, a container of tensors, or a list of objects.
            use_gather_object: Whether to gather tensors as objects too, which allows different shapes.
            dataloader: The loader that the batch came from. By default it is the one that handed out a batch last.
        """
        return gather_results(
            input_data,
            self.gradient_state.active_dataloader if dataloader is None else dataloader,
            self.strategy.data_group,
            num_ranks=self.strategy.num_data_ranks,
            as_objects=use_gather_object,
            is_spread=self.strategy.mesh is not None,
        )

    @property
    def sync_gradients(self) -> bool:
        """Tell whether this micro-batch closes the accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def step(self) -> int:
        """Return the number of micro-batches since the loader began."""
        return self.window.step

    @step.setter
    def step(self, step: int) -> None:
        self.window.step = step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[object]:
        """Wrap one micro-batch: gradients add up, and the optimizer steps when the window is full.

        Args:
            *models: The prepared models that take part in the micro-batch.
        """
        context = self.window.micro_batch(models)
        for notify in self.instruments.micro_batch_started:
            notify(self, models)
        return context

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients unreduced inside the context.

        Args:
            model: A prepared model.
        """
        self.window.unsynced += 1
        try:
            with self.strategy.no_sync(model):
                yield
        finally:
            self.window.unsynced -= 1

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[object]:
        """Reduce gradients in the next backward pass although its forward pass ran in `no_sync`.

        Args:
            model: A prepared model.
        """
        return self.strategy.resume_sync(model)

    def backward(self, loss: Tensor, *, num_items: int | Tensor | None = None, **kwargs: Any) -> None:
        """Compute gradients, as `loss.backward()` does.

        `loss` is the mean over the micro-batch. Micro-batches and processes then weigh the same however many samples
        or tokens each holds. To weigh every item the same, give the *sum* of the losses and the number of items it
        sums over: `backward(loss_sum, num_items=n)`. The gradients that clipping and the optimizer see are then those
        of all losses divided by all items, over every micro-batch of the window and every process.

        Args:
            loss: A mean, or with `num_items` a sum.
            num_items: How many items `loss` sums over on this process: a number, or a tensor on the device.
            **kwargs: Arguments of `Tensor.backward`; or `learning_rate`, for optimizers that step here.
        """
        if not self._optimizers:
            self._warn_that_no_optimizer_obeys()
        seen = self.instruments
        for notify in seen.backward_started:
            notify(self, loss)
        if "learning_rate" in kwargs and not take_learning_rate(self._optimizers, kwargs):
            refuse_beside_lomo(num_items, self.scaler, kwargs)
            self.lomo_backward(self._share_of_mean(loss), kwargs["learning_rate"])
        elif num_items is not None:
            with self.window.per_item(num_items, loss.device) as factor:
                self.strategy.backward(self.precision.scale(loss * factor.to(loss.dtype)), **kwargs)
        else:
            self.strategy.backward(self._share_of_mean(loss), **kwargs)
        for notify in seen.backward_ended:
            notify(self, loss)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Compute gradients and update parameters at once, by the optimizers that do so: LOMO and AdaLomo.

        Args:
            loss: The mean over the micro-batch.
            learning_rate: The learning rate of this step.
        """
        for optimizer in lomo_optimizers(self._optimizers):
            optimizer.fused_backward(loss, learning_rate)

    def forward_backward(
        self,
        model: nn.Module,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_items: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run a batch through the model and compute gradients, however the model is spread; return the mean loss.

        It stands for `loss = loss_fn(model(*args, **kwargs), target); accelerator.backward(loss, num_items=num_items)`,
        and is the only way to train a model that is cut into the stages of a pipeline.

        Args:
            model: A prepared model.
            *args: Arguments of the model.
            target: The second argument of `loss_fn`.
            loss_fn: Computes the loss from the output and the target. Without it the model returns its own loss.
            num_items: How many items of the batch the loss sums over; without it the loss is a mean.
            **kwargs: Keyword arguments of the model.
        """
        batch = Batch(args=args, kwargs=kwargs, target=target, loss_fn=loss_fn, num_items=num_items)
        own_passes: list[bool] = []
        loss = self.strategy.forward_backward(model, batch, self._shares(num_items, own_passes), self.backward)
        if own_passes:
            for notify in self.instruments.backward_ended:
                notify(self, loss)
        return loss

    def verify_parallel(
        self,
        make_model: Callable[[], nn.Module],
        batches: Sequence[Any],
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        make_optimizer: Callable[[Any], Optimizer] = torch.optim.SGD,
        max_norm: float | None = 1.0,
        sequence_dim: int | None = None,
    ) -> Comparison:
        """Train a model on this mesh and on one process, and compare losses, gradients, norms and parameters.

        For tests, on every rank: `result = accelerator.verify_parallel(...)`, then `assert result.equal, result`. What
        `meshwright check --mesh` does with a script, in fp32 and without dropout.

        Args:
            make_model: Makes the model, the same on every call after the same seed.
            batches: `(inputs, target)` pairs, the same on every rank: one for each data rank and step. Inputs are a
                tensor, a tuple, or a dict of keyword arguments.
            loss_fn: Computes the loss from the output and the target. Without it the model returns its own loss.
            make_optimizer: Makes an optimizer of parameters.
            max_norm: The largest norm of gradients; None does not clip.
            sequence_dim: The dimension in which tensors of a batch are cut along `cp` or `sp`.
        """
        from ..tools.verify.model import VerifiedTraining

        return VerifiedTraining(make_model, batches, loss_fn, make_optimizer, max_norm, sequence_dim).verify(self)

    @contextmanager
    def _shares(self, num_items: int | Tensor | None, own_passes: list[bool]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield what says for each loss of a batch with what its backward pass, in the context, begins."""
        own_passes.append(True)  # only a strategy that runs its own passes enters the context
        for notify in self.instruments.backward_started:
            notify(self, None)
        if num_items is None:
            yield self._share_of_mean
            return
        with self.window.per_item(num_items, self.device) as factor:
            yield lambda loss: self.precision.scale(loss * factor.to(loss.dtype))

    def _share_of_mean(self, loss: Tensor) -> Tensor:
        """Return what the backward pass of a mean loss begins with."""
        self.strategy.check_mean_loss(loss)
        return self.precision.scale(self.window.share_of_mean(loss))

    def _warn_that_no_optimizer_obeys(self) -> None:
        """Name what only a prepared optimizer does, where it was requested and none was prepared."""
        if not self.is_main_process:
            return
        if self.gradient_accumulation_steps > 1:
            warn(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, but no optimizer was given to this "
                "Accelerator's prepare(): a plain one steps on every micro-batch, unless the script calls it only "
                "`if accelerator.sync_gradients`."
            )
        if self.scaler is not None:
            warn(
                "fp16 losses are scaled, but no optimizer was given to this Accelerator's prepare(): a plain one steps "
                "with gradients that were not divided by the scale."
            )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16 gradients by the loss scale: those of the given optimizers, or of all.

        Args:
            optimizer: One prepared optimizer, or a list of them; None for all.
        """
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for opt in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self.scaler.unscale_(opt.optimizer if isinstance(opt, AcceleratedOptimizer) else opt)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; return the norm they had.

        Args:
            parameters: Parameters of prepared models, or one of them.
            max_norm: The largest norm that is left.
            norm_type: The order of the norm: 2, another number, or infinity.
        """
        if not self._gradients_are_final("clip_grad_norm_"):
            max_norm = float("inf")
        norm = self.strategy.clip_grad_norm(parameters, max_norm, norm_type)
        for notify in self.instruments.clipped:
            notify(self, norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut every gradient element to `[-clip_value, clip_value]`.

        Args:
            parameters: Parameters of prepared models, or one of them.
            clip_value: The largest absolute value that is left.
        """
        if self._gradients_are_final("clip_grad_value_"):
            self.strategy.clip_grad_value(parameters, clip_value)

    def _gradients_are_final(self, operation: str) -> bool:
        """Unscale gradients that are complete; warn where they still accumulate: clipping parts is not clipping."""
        check_clipping(self._optimizers, operation)
        if self.gradient_state.sync_gradients:
            self.strategy.complete_gradients()
            self.unscale_gradients()
            return True
        logger.warning_once(
            f"{operation}() was called while gradients still accumulate, and clipped nothing: only their final sum is "
            "clipped. Guard the call with `if accelerator.sync_gradients:`."
        )
        return False

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Tell whether an fp16 overflow made any optimizer leave out its last step."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Return a context that computes in the run's number format, for code outside a prepared model.

        Args:
            autocast_handler: Options of the context; without it the Accelerator's own are used.
        """
        return self.precision.autocast(autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[object]:
        """Cut sequences among the processes of the `cp` or the `sp` axis inside the context; without one, do nothing.

        Give everything that has a sequence dimension: inputs, positions and labels are cut in the same places. What a
        prepared loader has cut already (`sp`) stays as it is.

        Args:
            buffers: Tensors with a sequence dimension.
            buffer_seq_dims: For each of them, which dimension that is.
            no_restore_buffers: Those that need not be whole again after the context.
        """
        return self.strategy.split_sequences(buffers or [], buffer_seq_dims or [], no_restore_buffers)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Joinable], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes with more batches finish while the others stand in for their collectives.

        Args:
            joinables: The prepared models that are trained inside.
            even_batches: The setting of all prepared loaders inside the context; None leaves it.
        """
        with ExitStack() as stack:
            stack.enter_context(self._even_batches_set_to(even_batches))
            if self.use_distributed:
                stack.enter_context(Join(list(joinables), enable=True, throw_on_early_termination=False))
            yield

    @contextmanager
    def _even_batches_set_to(self, even_batches: bool | None) -> Iterator[None]:
        loaders = [loader for loader in self._dataloaders if isinstance(loader, DataLoaderShard)]
        shards = [loader.shard for loader in loaders if loader.shard is not None]
        before = [shard.even_batches for shard in shards]
        others, count = len(self._dataloaders) - len(shards), len(self._dataloaders)
        if even_batches is not None and others and self.use_distributed:
            warn(
                f"join_uneven_inputs(even_batches={even_batches}) is only supported for map-style datasets that every "
                f"process reads for itself: {others} of {count} prepared loaders are not changed."
            )
        for shard in shards:
            shard.even_batches = shard.even_batches if even_batches is None else even_batches
        for loader in loaders:
            loader.joined = True
        try:
            yield
        finally:
            for shard, even in zip(shards, before, strict=True):
                shard.even_batches = even
            for loader in loaders:
                loader.joined = False

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profile the block; with `output_trace_dir` every process writes `profile_<rank>.json` there.

        Args:
            profile_handler: Options of the profiler; without it the Accelerator's own are used.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json"))
            self.wait_for_everyone()

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
        """Return a loader like this one that starts after its first batches.

        Args:
            dataloader: A loader, prepared or not.
            num_batches: How many batches are left out, counted on this process.
        """
        skipped = skip_first_batches(dataloader, num_batches)
        skipped.gradient_state = self.gradient_state
        return skipped

    def asleep(
        self, *objects: nn.Module | Optimizer, to: str = "host", folder: str | os.PathLike[str] | None = None
    ) -> Sleeping:
        """Free the device of models and optimizers inside a `with` block, for an engine that needs the memory.

        Parameters, gradients, buffers and optimizer state are copied away, and their memory on the device is freed. At
        the end of the block, also after an exception, they are restored bit by bit in the same tensors. Calls of what
        is asleep raise. Processes do not wait for each other.

        Args:
            *objects: Models and optimizers, prepared.
            to: Where the tensors go: "host" (pinned memory) or "disk".
            folder: A folder on the disk to use; by default that of temporary files.

        Returns:
            The context; its `num_bytes` are what is away, and `wake()` ends it early.
        """
        from ..weights.sleeping import Sleeping

        folder = None if folder is None else Path(folder)
        return Sleeping(objects, self.state._runtime, self.features, to=to, folder=folder)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget everything that was prepared and give memory back; returns a None for every object.

        Args:
            *objects: Variables of the script: assign the result to them, so that nothing holds the objects.
        """
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self.window.reset()
        if self._checkpointer is not None:
            self._checkpointer.wait()
            self._checkpointer.staging.clear()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do as `free_memory`.

        Args:
            *objects: As for `free_memory`.
        """
        return self.free_memory(*objects)

    @effect()
    def end_training(self) -> None:
        """Finish the run: wait for a save, for the trackers and for the others, and leave the process group."""
        for notify in self.instruments.closed:
            notify(self)
        if self._checkpointer is not None:
            self._checkpointer.end()
        if self._trackers is not None:
            self._trackers.finish()
        self.wait_for_everyone()
        self.state._started.leave_group(all_ranks=True)

    def __repr__(self) -> str:
        here = self.state._started  # also after a reset
        return (
            f"Accelerator(rank {here.process_index} of {here.num_processes} on {here.device}, "
            f"mixed_precision={self.state._mixed_precision!r}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps})"
        )


def _unprepared(objects: Sequence[Any], is_kind: Callable[[Any], bool]) -> list[int]:
    """Return where the objects of a kind are that no Accelerator has prepared."""
    return [i for i, obj in enumerate(objects) if not _is_prepared(obj) and is_kind(obj)]


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda obj: isinstance(obj, kind)


def _is_prepared(obj: Any) -> bool:
    return bool(getattr(obj, "_is_accelerate_prepared", False))


def _is_scheduler(obj: Any) -> bool:
    """Recognise a scheduler by what it can do, so that those of other libraries count too."""
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return True
    if isinstance(obj, (Optimizer, nn.Module)):  # an optimizer around another one has `optimizer`, too
        return False
    return all(callable(getattr(obj, name, None)) for name in ("step", "state_dict", "load_state_dict")) and (
        hasattr(obj, "get_last_lr") or hasattr(obj, "optimizer")
    )


def __getattr__(name: str) -> Any:
    """Hand on a name that libraries take from here and that takes long to import."""
    if name == "get_state_dict_offloaded_model":
        from ..inference.offload.offloaded import get_state_dict_offloaded_model

        return get_state_dict_offloaded_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
