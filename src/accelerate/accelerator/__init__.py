"""`Accelerator`: the one object a user holds. It delegates; it never asks which backend it is on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..checkpoint.formats.saving import save
from ..config.enums import DynamoBackend, RNGType
from ..config.environment import TRACE_FOLDER, read, read_setting
from ..config.origins import NOT_YET
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
from ..config.settings import TrainingSettings
from ..data.loaders.base import PreparedLoader
from ..data.loaders.shard import DataLoaderShard
from ..data.preparing import prepare_data_loader, samples_per_process, skip_first_batches
from ..errors import UnsupportedSettingError
from ..errors.callers import suggesting_arguments, warn
from ..logging import get_logger
from ..optimizer import AcceleratedOptimizer, refuse_weights_that_are_away, warn_of_another_models_optimizer
from ..parallel.base import Batch, Bundle, Steps
from ..parallel.compilation import compiling
from ..parallel.mesh.fsdp2 import fsdp2_apply_ac, fsdp2_prepare_model
from ..parallel.modules.unwrapping import extract_model_from_parallel
from ..parallel.registry import strategy_for
from ..precision import precision_for
from ..precision.fp8 import convert_model_to_fp8_ao
from ..runtime import phases
from ..runtime.collectives import operations as collectives
from ..runtime.collectives.nested import leaves, recursively_apply
from ..runtime.devices.memory import release_memory
from ..runtime.loop.gradient_state import GradientState
from ..scheduler import AcceleratedScheduler
from ..state import AcceleratorState, several_plugins_in_use
from .accumulation import AccumulationWindow
from .process_methods import ProcessMethods

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..checkpoint.checkpointer import Checkpointer, CheckpointLocation
    from ..checkpoint.commit.engine import LoadReport
    from ..tracking.trackers import Trackers

logger = get_logger(__name__)

_unset: Any = object()
H = TypeVar("H", bound=KwargsHandler)


class Accelerator(ProcessMethods):
    """Take a PyTorch training loop to any number of processes.

    Make one, hand model, optimizer, data loaders and scheduler to `prepare`, and call `backward` for
    `loss.backward()`. The rest of the loop stays as it is. An argument that is left out comes from `accelerate launch`
    (by environment variables) where a flag exists for it, else it has its default.

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
        torch_tp_plugin: Refused by this version. `parallelism_config` with `tp_size` asks for tensor parallelism.
        megatron_lm_plugin: Refused by this version, which has no Megatron-LM engine.
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
    """

    @suggesting_arguments
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
    ) -> None:
        _refuse_what_has_not_landed(
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        handlers = _Handlers(kwargs_handlers or ())
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

        self.settings = TrainingSettings.from_arguments(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugins=_one_of(deepspeed_plugin, deepspeed_plugins) or several_plugins_in_use(),
            parallelism_config=parallelism_config,
            dynamo_plugin=_compilation_in_code(dynamo_backend, dynamo_plugin),
        )
        self.state = AcceleratorState(
            mixed_precision=self.settings.mixed_precision,
            cpu=cpu,
            dynamo_plugin=self.settings.compilation,
            deepspeed_plugin=self.settings.deepspeed,
            _from_accelerator=True,
            **(self.init_handler.to_kwargs() if self.init_handler is not None else {}),
        )
        self.gradient_state = GradientState(self.settings.gradient_accumulation)
        self.strategy = strategy_for(
            self.state._runtime,
            ddp=self.ddp_handler,
            sharding=self.settings.sharding,
            deepspeed=self.settings.deepspeed,
            parallelism=self.settings.parallelism,
            mixed_precision=self.settings.mixed_precision,
        )
        me = ref(self)
        self.strategy.steps = Steps(
            recompute=lambda model: fsdp2_apply_ac(me(), model), shard=lambda model: fsdp2_prepare_model(me(), model)
        )
        self.strategy = compiling(self.strategy, self.settings.compilation)
        self.state._describe(self.strategy)
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
        self.window = AccumulationWindow(self.gradient_state, self.strategy, self._models)
        self._checkpointer: Checkpointer | None = None
        self.flag_tensor: Tensor | None = None
        if read(TRACE_FOLDER) is not None:
            self._keep_a_diary()
        if read_setting("check"):
            from .checking import check  # on first use: hardly any run asks for it

            check(self)

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
        args = tuple(self._taken_over(arg) for arg in args)
        placements = list(device_placement) if device_placement is not None else [None] * len(args)
        if len(placements) != len(args):
            raise ValueError(
                f"`device_placement` should be a list with {len(args)} elements, one for each object, but it has "
                f"{len(placements)}."
            )
        result = list(args)
        fresh = [i for i, arg in enumerate(args) if not _is_prepared(arg)]
        models = [i for i in fresh if isinstance(args[i], nn.Module)]
        optimizers = [i for i in fresh if isinstance(args[i], Optimizer)]
        schedulers = [i for i in fresh if _is_scheduler(args[i])]
        prepared = self._prepare_bundle(
            [args[i] for i in models],
            [args[i] for i in optimizers],
            [placements[i] for i in models],
            schedulers=[args[i] for i in schedulers],
            loaders=[arg for arg in args if isinstance(arg, DataLoader)],
        )
        for i, model in zip(models, prepared.models, strict=True):
            result[i] = model
        for i, optimizer in zip(optimizers, prepared.optimizers, strict=True):
            result[i] = self._wrap_optimizer(optimizer, placements[i])
        for i in fresh:
            if isinstance(args[i], DataLoader):
                result[i] = self.prepare_data_loader(args[i], placements[i])
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
        model = self._taken_over(model)
        if _is_prepared(model):
            return model
        return self._prepare_bundle([model], [], [device_placement], evaluation=evaluation_mode).models[0]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap one optimizer.

        Args:
            optimizer: The optimizer of a model that is prepared already.
            device_placement: Whether its state is moved to the device; None takes the Accelerator's own setting.
        """
        optimizer = self._taken_over(optimizer)
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = self._prepare_bundle([], [optimizer], [])
        return self._wrap_optimizer(prepared.optimizers[0], device_placement)

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
        if isinstance(data_loader, PreparedLoader):
            if data_loader not in self._dataloaders:
                data_loader.gradient_state = self.gradient_state
                self._dataloaders.append(data_loader)
            return data_loader
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
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
        )
        prepared.gradient_state = self.gradient_state
        prepared.group = self.strategy.data_group
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Tie one scheduler to the steps of its optimizer, unless an engine advances it.

        Args:
            scheduler: The scheduler of an optimizer that is prepared already.
        """
        scheduler = self._taken_over(scheduler)
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

    def _taken_over(self, obj: Any) -> Any:
        """Take what another Accelerator prepared out of its hands; return anything else as it is.

        Left there, it would obey that one's accumulation window, and fp16 losses scaled here would be unscaled nowhere.
        """
        if isinstance(obj, AcceleratedOptimizer) and obj not in self._optimizers:
            return obj.optimizer
        if isinstance(obj, AcceleratedScheduler) and obj not in self._schedulers:
            return obj.scheduler
        if isinstance(obj, PreparedLoader):
            return self.prepare_data_loader(obj)
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
        refuse_weights_that_are_away([*self._models, *models], optimizers)
        for model in models:
            self.verify_device_map(model)
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
                    self._placement(place) and not hasattr(model, "hf_device_map")
                    for model, place in zip(models, placements, strict=True)
                ],
                evaluation=evaluation,
            )
        )
        for model in bundle.models:
            model._is_accelerate_prepared = True  # type: ignore[assignment]
            self._models.append(model)
        return bundle

    def _wrap_optimizer(self, optimizer: Optimizer, device_placement: bool | None) -> AcceleratedOptimizer:
        wrapped = AcceleratedOptimizer(optimizer, self._placement(device_placement), self.precision.scaler)
        wrapped.gradient_state = self.gradient_state
        if not self.strategy.capabilities.owns_scaling:  # an engine keeps the gradients elsewhere
            wrapped.before_first_step = partial(warn_of_another_models_optimizer, models=self._models)
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
        loader = self.gradient_state.active_dataloader if dataloader is None else dataloader
        partial = None if loader is None else loader.partial_round
        as_objects = use_gather_object or not all(isinstance(leaf, Tensor) for leaf in leaves(input_data))
        if self.strategy.mesh is not None and not as_objects:
            input_data = recursively_apply(collectives.whole, input_data)
        if partial is not None:
            return partial.gather(input_data, as_objects)
        if self.strategy.num_data_ranks == 1:
            return input_data
        group = self.strategy.data_group
        return collectives.gather_object(input_data, group) if as_objects else collectives.gather(input_data, group)

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
        return self.window.micro_batch(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Leave gradients unreduced inside the context.

        Args:
            model: A prepared model.
        """
        return self.strategy.no_sync(model)

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
            **kwargs: Arguments of `Tensor.backward`.
        """
        if not self._optimizers:
            self._warn_that_no_optimizer_obeys()
        if "learning_rate" in kwargs:
            raise UnsupportedSettingError(
                "backward(learning_rate=...)",
                f"it is for LOMO optimizers, which step inside the backward pass, and {NOT_YET}",
                "Use another optimizer.",
            )
        clock = phases.clock
        if clock is not None:
            clock.enter(phases.BACKWARD)
        if num_items is not None:
            with self.window.per_item(num_items, loss.device) as factor:
                self.strategy.backward(self.precision.scale(loss * factor.to(loss.dtype)), **kwargs)
        else:
            self.strategy.backward(self._share_of_mean(loss), **kwargs)
        if clock is not None:
            clock.enter(phases.OTHER)

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
        return self.strategy.forward_backward(model, batch, self._shares(num_items), self.backward)

    @contextmanager
    def _shares(self, num_items: int | Tensor | None) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield what says for each loss of a batch with what its backward pass, in the context, begins."""
        if num_items is None:
            yield self._share_of_mean
            return
        with self.window.per_item(num_items, self.device) as factor:
            yield lambda loss: self.precision.scale(loss * factor.to(loss.dtype))

    def _share_of_mean(self, loss: Tensor) -> Tensor:
        """Return what the backward pass of a mean loss begins with."""
        self.strategy.look_at_mean(loss)
        return self.precision.scale(self.window.share_of_mean(loss))

    def _warn_that_no_optimizer_obeys(self) -> None:
        """Name what only a prepared optimizer does, where it was asked for and none was prepared."""
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
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut every gradient element to `[-clip_value, clip_value]`.

        Args:
            parameters: Parameters of prepared models, or one of them.
            clip_value: The largest absolute value that is left.
        """
        if self._gradients_are_final("clip_grad_value_"):
            torch.nn.utils.clip_grad_value_(self.strategy.current(parameters), clip_value)

    def _gradients_are_final(self, operation: str) -> bool:
        """Unscale gradients that are complete; warn where they still accumulate: clipping parts is not clipping."""
        if self.gradient_state.sync_gradients:
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
        """Cut sequences among the processes of the `cp` axis inside the context; without that axis, do nothing.

        Give everything that has a sequence dimension: inputs, positions and labels are cut in the same places.

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

    # --- trackers -------------------------------------------------------------------------------------------------

    @property
    def log_with(self) -> list[Any]:
        """Return the names and objects of the trackers that were asked for and can be used."""
        return [] if self._trackers is None else self._trackers.requested

    @property
    def trackers(self) -> list[Any]:
        """Return the tracker objects, once what was logged so far has reached them."""
        return [] if self._trackers is None else self._trackers.drained()

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Open a run in every tracker of `log_with` and store its config, whatever that is made of.

        Args:
            project_name: Name of the project in every tracker.
            config: Settings of the run, which every tracker stores.
            init_kwargs: Options of each tracker by its name: `{"wandb": {"entity": "my_team"}}`.
            strict: Whether the error of a tracker that fails later is raised. By default it is reported, the tracker
                is left out, and training goes on.
        """
        if self._trackers is not None:
            self._trackers.begin(project_name, config, init_kwargs or {}, strict=strict)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` its client's own object; other ranks get one that does nothing.

        Args:
            name: The tracker's name, such as "tensorboard".
            unwrap: Whether the client's own object is returned.
        """
        if self._trackers is None:
            raise ValueError(f"There is no tracker {name!r}: Accelerator(log_with={name!r}) asks for it.")
        return self._trackers.named(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        reduce: str | None = None,
    ) -> None:
        """Log values to every tracker, and go on before they are written.

        Args:
            values: Numbers, tensors of one element, or whatever else the trackers take, by name.
            step: Number of the step; without it the trackers count.
            log_kwargs: Options of each tracker's own log function, by the tracker's name.
            reduce: "mean", "sum", "max" or "min": the values of all processes become one first, and every process must
                call `log` with the same names. Without it the values of the main process are logged.
        """
        if self._trackers is not None:
            self._trackers.log(values, step, log_kwargs or {}, reduce)

    # --- models and files -----------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model from under what `prepare` put around it.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether outputs are still converted to fp32 under mixed precision.
            keep_torch_compile: Whether a compiled model stays compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's whole state, with the names the user's own model gives.

        Where a model is spread over processes, all of them call it: the main process gets the state, the others an
        empty one.

        Args:
            model: A prepared model.
            unwrap: Whether the names are those of the user's own model; otherwise those of what `prepare` returned.
        """
        own = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        if any(param.is_meta for param in own.parameters()):  # its weights are on the host or on disk
            from ..inference.offload.offloaded import get_state_dict_offloaded_model

            return get_state_dict_offloaded_model(own)
        return self.strategy.whole_state(own)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object to disk once: on the main process, or once per host with `save_on_each_node`.

        Args:
            obj: What is saved.
            f: The file.
            safe_serialization: Whether a state dict is written by safetensors instead of `torch.save`.
        """
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights where other tools find them, in shards where they are large.

        The main process writes and waits for nobody, so it may be the only one to call this; where a model is spread
        over processes, all of them call it. Of tied weights the first name is stored. Old files go when the new ones
        are there.

        Args:
            model: The model, prepared or not.
            save_directory: Folder of the files. It is made where it does not exist.
            max_shard_size: Largest size of a file, in bytes or as "5GB"; a larger model is split, with an index.
            safe_serialization: Whether to write safetensors; otherwise files of `torch.save`.
        """
        from ..checkpoint.formats.model_files import save_model_files

        if isinstance(model, Mapping):
            raise TypeError(
                f"save_model() takes a model, and was given a {type(model).__name__}. Give it the model itself, whose "
                "weights it collects; accelerator.save(state_dict, file) writes a state that you have."
            )
        if os.path.isfile(save_directory):
            raise ValueError(f"save_model needs a folder, and {os.fspath(save_directory)} is a file.")
        state = self.get_state_dict(model)
        empty = [name for name, value in state.items() if getattr(value, "is_meta", False)]
        if empty:
            raise RuntimeError(
                "You can't save the model since some parameters are on the meta device and have no values: "
                f"{', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''}. Load them first."
            )
        on_each_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if on_each_node else self.is_main_process:
            save_model_files(
                state, Path(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )
        if self.checkpointer.needs_all_ranks([]):  # all are here: none goes on before the files are there
            self.wait_for_everyone()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """What makes and loads the checkpoints of everything that was prepared."""
        if self._checkpointer is None:
            from ..checkpoint.checkpointer import Checkpointer, Prepared

            prepared = Prepared(
                models=self._models,
                optimizers=self._optimizers,
                schedulers=self._schedulers,
                loaders=self._dataloaders,
                window=self.window,
                strategy=self.strategy,
                trackers=self._trackers,
            )
            self._checkpointer = Checkpointer(self.state._started, self.project_configuration, prepared)
        return self._checkpointer

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered, and return where: whole, or not at all.

        Call it on all processes. Where each of them holds the whole model (one process, DDP) the main process may call
        it alone; the checkpoint then lacks the random states of the others.

        Args:
            output_dir: Folder or fsspec URL of the checkpoint. With `automatic_checkpoint_naming` it is left out, and
                the name is chosen.
            safe_serialization: Whether models that are not sharded are written as safetensors; otherwise by
                `torch.save`.
            wait: Whether to return only when the checkpoint is committed. With False training goes on once the state
                is copied; the next save, load or `end_training` waits for the files, and raises what went wrong.
            **save_model_func_kwargs: Accepted, because the interface has it; nothing here reads it.

        Returns:
            The path of the checkpoint.
        """
        with phases.during(phases.SAVING):
            return self.checkpointer.save(
                None if output_dir is None else os.fspath(output_dir),
                scaler=self.scaler,
                safe_serialization=safe_serialization,
                wait=wait,
            )

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        verify: str = "size",
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        """Restore everything from a checkpoint, or raise and list what does not fit.

        Loaders begin the epoch they were in again, in its order, and the script skips what it has seen; `resume` lets
        them go on at the next batch.

        Args:
            input_dir: Folder or URL of a checkpoint. Without it the newest committed one of the project is taken.
            load_kwargs: Arguments of `torch.load`, for the files that it reads.
            strict: Whether a difference between checkpoint and run is an error. With False what fits is loaded, and
                the report lists the rest.
            verify: What is checked before anything is restored: "size" of every file, or "hash", which reads every
                byte.
            **load_model_func_kwargs: Arguments of `load_state_dict` of the models.

        Returns:
            What was loaded, and what differs.
        """
        place = self.checkpointer.find(None if input_dir is None else os.fspath(input_dir))
        return self._restore(place, load_kwargs, seek=False, strict=strict, verify=verify, **load_model_func_kwargs)

    def resume(self, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> LoadReport | None:
        """Go on from the newest committed checkpoint if there is one, and say so; else begin anew and return None.

        Every loader goes on at the next batch.

        Args:
            input_dir: Folder or URL of a checkpoint. Without it the newest automatic checkpoint is looked for.
            **options: Those of `load_state`.
        """
        place = self.checkpointer.find(None if input_dir is None else os.fspath(input_dir))
        if not self.checkpointer.exists(place):
            logger.info("There is no checkpoint in %s: the run begins.", input_dir or self.project_dir)
            return None
        return self._restore(place, **options, seek=True)

    def _restore(
        self,
        place: CheckpointLocation,
        load_kwargs: dict[str, Any] | None = None,
        *,
        seek: bool,
        strict: bool = True,
        verify: str = "size",
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        return self.checkpointer.load(
            place,
            scaler=self.scaler,
            seek=seek,
            strict=strict,
            verify=verify,
            load_options=load_kwargs or {},
            model_options=load_model_func_kwargs,
        )

    def save_if_preempted(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Save and leave if the run was asked to, by SIGTERM or by a file `PREEMPT` in the project folder.

        All processes call it, as the last thing of a step, and agree, which costs one small message per call. The
        program ends with exit code 75, which `accelerate launch` and a batch system take as "start me again".

        Args:
            output_dir: The checkpoint's folder, as for `save_state`.
        """
        reason = self.checkpointer.preempted()
        if reason is not None:
            self.checkpointer.exit_preempted(self.save_state(output_dir), reason)

    def _keep_a_diary(self) -> None:
        """Note every backward pass, for `accelerate verify-resume`."""
        from ..checkpoint.trace import Trace

        plain_backward, plain_pass = self.backward, self.forward_backward
        trace = self.checkpointer.trace = Trace.from_environment(self.process_index)

        def note(loss: Tensor) -> None:
            scale = None if self.scaler is None else self.scaler.get_scale()
            trace.record(loss, self._optimizers, self._dataloaders, scale)

        def backward(loss: Tensor, **kwargs: Any) -> None:
            plain_backward(loss, **kwargs)
            note(loss)

        def forward_backward(*args: Any, **kwargs: Any) -> Tensor:
            noted = trace.count
            loss = plain_pass(*args, **kwargs)
            if trace.count == noted:  # a pipeline does not go through backward()
                note(loss)
            return loss

        self.checkpointer.register(trace)
        self.backward = backward  # type: ignore[method-assign]
        self.forward_backward = forward_backward  # type: ignore[method-assign]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects, which have `state_dict` and `load_state_dict`, with everything else.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.
        """
        self.checkpointer.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before every save; weights it removes are not saved again.

        Args:
            hook: The function.
        """
        return self.checkpointer.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before every load; models it removes are not loaded again.

        Args:
            hook: The function.
        """
        return self.checkpointer.add_load_hook(hook)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> PreparedLoader:
        """Return a loader like this one that starts after its first batches.

        Args:
            dataloader: A loader, prepared or not.
            num_batches: How many batches are left out, counted on this process.
        """
        skipped = skip_first_batches(dataloader, num_batches)
        skipped.gradient_state = self.gradient_state
        return skipped

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

    def end_training(self) -> None:
        """Finish the run: wait for a save, for the trackers and for the others, and leave the process group."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._trackers is not None:
            self._trackers.finish()
        self.wait_for_everyone()
        self.state._started.leave_group(together=True)

    def __repr__(self) -> str:
        here = self.state._started  # also after a reset
        return (
            f"Accelerator(rank {here.process_index} of {here.num_processes} on {here.device}, "
            f"mixed_precision={self.mixed_precision!r}, "
            f"gradient_accumulation_steps={self.gradient_accumulation_steps})"
        )


class _Handlers:
    """The `kwargs_handlers` argument: at most one of each kind, and none that nobody reads."""

    def __init__(self, handlers: Sequence[KwargsHandler]) -> None:
        self._by_type: dict[type, KwargsHandler] = {}
        for handler in handlers:
            if not isinstance(handler, KwargsHandler):
                raise TypeError(
                    f"Unsupported kwargs handler passed: {handler!r}. kwargs_handlers takes objects such as "
                    "DistributedDataParallelKwargs(...)."
                )
            if type(handler) in self._by_type:
                raise ValueError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`: there are two.")
            self._by_type[type(handler)] = handler

    def take(self, kind: type[H]) -> H | None:
        return cast("H | None", self._by_type.pop(kind, None))

    def refuse_rest(self) -> None:
        for kind in self._by_type:
            raise UnsupportedSettingError(f"kwargs_handlers=[{kind.__name__}()]", NOT_YET, "Leave it out.")


def _refuse_what_has_not_landed(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedSettingError(f"Accelerator({name}=...)", NOT_YET, "Leave it out.")


def _one_of(deepspeed_plugin: Any, deepspeed_plugins: Any) -> Any:
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ValueError(
            "Accelerator was given deepspeed_plugin and deepspeed_plugins: pass all of them in deepspeed_plugins."
        )
    return deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin


def _compilation_in_code(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None
) -> TorchDynamoPlugin | None:
    if backend is None:
        return plugin
    if plugin is not None:
        raise ValueError(
            "Accelerator was given dynamo_backend and a dynamo_plugin: give the backend in one place, "
            "TorchDynamoPlugin(backend=...)."
        )
    return TorchDynamoPlugin(backend=backend)


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
