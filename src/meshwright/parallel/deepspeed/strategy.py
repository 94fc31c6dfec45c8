"""DeepSpeed: every model and its optimizer become a DeepSpeed engine.

[Note: ownership] DeepSpeed owns the parameters, their dtype, the optimizer step and its own scheduler. The script owns
the loop: when to step, what the loss is, where gradients are clipped. So DeepSpeed runs with
`managed_gradient_accumulation` off, and `AcceleratedOptimizer`, which knows when to step, steps an `EngineOptimizer`. A
model computes under autocast inside its engine, so that inputs and outputs are fp32 as with other strategies.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim import Optimizer

from ...config.enums import DistributedType
from ...config.environment import export, read
from ...config.packages import compare_versions, has_package
from ...config.plugins.deepspeed import GATHER_ON_SAVE, DeepSpeedPlugin
from ...errors import RuntimeConflictError, UnsupportedSettingError
from ...runtime.collectives.operations import gather_object
from ...runtime.devices import device as devices
from ...runtime.group.runtime import Runtime
from ..base import Bundle, Capabilities, EngineState, Strategy, params_of
from ..modules.spread import ZERO_INIT, Layout
from .engine import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler, EngineOptimizer, engines_of_loss
from .filling import complete_config

logger = logging.getLogger(__name__)

OLDEST = "0.19.8"
_COMPILED_ON_FIRST_USE = "deepspeed_shm_comm"


class DeepSpeedEngines(Strategy):
    """Train every model with a DeepSpeed engine, configured by the plugin that is selected when it is prepared."""

    capabilities = Capabilities(owns_scaling=True, compiles_inside=True)

    def __init__(self, runtime: Runtime, plugins: Mapping[str, DeepSpeedPlugin]) -> None:
        super().__init__(runtime)
        self.plugins = plugins
        self._engines: list[weakref.ref[EngineOptimizer]] = []
        self._all_engines: weakref.WeakSet[Any] = weakref.WeakSet()
        load_deepspeed(runtime)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        return next(plugin for plugin in self.plugins.values() if plugin.selected)

    @property
    def published(self) -> Mapping[str, Any]:
        """Attributes of `AcceleratorState` that depend on the strategy."""
        return {"deepspeed_plugins": self.plugins, "_engine": DistributedType.DEEPSPEED}

    def engines(self) -> list[EngineOptimizer]:
        """Return the engines that train, in creation order, which is the same on every process."""
        alive = [(reference, engine) for reference in self._engines if (engine := reference()) is not None]
        self._engines = [reference for reference, _ in alive]
        return [engine for _, engine in alive]

    # --- prepare ----------------------------------------------------------------------------------------------------

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        return f"DeepSpeed's own layout of {self.num_data_ranks} processes (ZeRO stage {self.plugin.zero_stage})"

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return whether DeepSpeed has partitioned the parameters itself."""
        return layout.by == ZERO_INIT

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model without an optimizer in an engine under ZeRO-3; return it unchanged otherwise."""
        if self.plugin.zero_stage != 3 or not any(True for _ in model.parameters()):
            return model
        engine: nn.Module = self._engine(model, None, None, Bundle())
        return engine

    def prepare(self, bundle: Bundle) -> Bundle:
        """Make an engine of every model that has an optimizer in the bundle."""
        owners = [self._model_of(optimizer, bundle) for optimizer in bundle.optimizers]
        models, optimizers = list(bundle.models), list(bundle.optimizers)
        schedulers = list(bundle.schedulers)
        for index, model in enumerate(bundle.models):
            own = [number for number, owner in enumerate(owners) if owner is model]
            if len(own) > 1:
                raise UnsupportedSettingError(
                    f"{len(own)} optimizers for one {type(model).__name__}",
                    "an engine of DeepSpeed steps one.",
                    "Put their parameters into groups of one optimizer.",
                )
            if bundle.evaluation or not own:
                if bundle.place_models[index]:
                    self._move(model)
                models[index] = model if bundle.evaluation else self.wrap(model)
                continue
            given = bundle.optimizers[own[0]]
            its_schedules = [number for number, s in enumerate(bundle.schedulers) if s.optimizer is given]
            stand_in = next(
                (bundle.schedulers[n] for n in its_schedules if isinstance(bundle.schedulers[n], DummyScheduler)), None
            )
            engine = self._engine(model, given, stand_in, bundle)
            models[index] = engine
            optimizers[own[0]] = trained = EngineOptimizer(engine)
            self._engines.append(weakref.ref(trained))
            for number in its_schedules:
                schedulers[number] = self._schedule(schedulers[number], given, engine)
        return replace(bundle, models=models, optimizers=optimizers, schedulers=schedulers)

    def _model_of(self, optimizer: Optimizer, bundle: Bundle) -> nn.Module:
        wanted = {id(param) for param in params_of(optimizer)}
        for model in bundle.models:
            if any(id(param) in wanted for param in model.parameters()):
                return model
        raise ValueError(
            f"Rank {self.runtime.process_index}: {type(optimizer).__name__} came to prepare() without the model whose "
            "parameters it has. DeepSpeed lays them out together: prepare(model, optimizer) in one call."
        )

    def _engine(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: DummyScheduler | None, bundle: Bundle
    ) -> Any:
        import deepspeed

        plugin = self.plugin
        plugin.set_moe_leaf_modules(model)
        claims = complete_config(plugin, bundle, self.num_data_ranks, model, optimizer, scheduler)
        config = claims.config
        if optimizer is None or not isinstance(optimizer, DummyOptim):
            if optimizer is not None and "optimizer" in config:
                raise ValueError(
                    f"{plugin.source} has an optimizer of its own ({config['optimizer'].get('type')}), and "
                    f"{type(optimizer).__name__} came to prepare(): give DummyOptim(...), or take it out of the config."
                )
            config.pop("optimizer", None)
        if scheduler is None:
            config.pop("scheduler", None)
        handed: Any = None if isinstance(optimizer, DummyOptim) else optimizer
        if isinstance(optimizer, DummyOptim) and "optimizer" not in config:
            raise ValueError(
                f"DummyOptim stands in for the optimizer of DeepSpeed's config, and {plugin.source} has none."
            )
        if handed is not None:
            handed = self._fit_for_offload(handed, config)
            config.setdefault("zero_allow_untested_optimizer", True)
        if claims.filled and self.runtime.is_main_process:
            print(f'"auto" in {plugin.source}:\n{claims.explain()}', file=sys.stderr, flush=True)
        if config.get("zero_optimization", {}).get("stage") in (1, 2):
            self._require_one_order_of_gradients()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=handed,
            model_parameters=_groups(optimizer) if isinstance(optimizer, DummyOptim) else None,
            lr_scheduler=None if scheduler is None else scheduler.lr_scheduler_callable,
            config=config,
        )
        self._all_engines.add(engine)
        return engine

    def _require_one_order_of_gradients(self) -> None:
        """Refuse ranks on which gradients arrive in different orders: ZeRO-1 and ZeRO-2 sum them in that order.

        DeepSpeed replaces `torch.nn.functional.linear` for good where ZeRO-3 has run, which changes the order.
        """
        replaced = gather_object([nn.functional.linear.__module__ == "deepspeed.runtime.zero.linear"])
        if len(set(replaced)) > 1:
            ranks = [rank for rank, here in enumerate(replaced) if here]
            raise RuntimeConflictError(
                f"Rank {self.runtime.process_index}: torch.nn.functional.linear is replaced on ranks {ranks} only, "
                f"where ZeRO-3 has run in this process before. ZeRO-{self.plugin.zero_stage} would sum gradients of "
                "different parameters. Start new processes for this training, or let all ranks run ZeRO-3 before."
            )

    def _fit_for_offload(self, optimizer: Optimizer, config: dict[str, Any]) -> Optimizer:
        """Use the given optimizer for offloaded states, unless the config selects DeepSpeed's own."""
        offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
        if offload == "none":
            return optimizer
        if config.setdefault("zero_force_ds_cpu_optimizer", False):
            return map_pytorch_optim_to_deepspeed(optimizer)
        if self.runtime.is_main_process:
            logger.warning(
                "Optimizer states are offloaded to %s and stepped by %s. DeepSpeed's own optimizers are faster there: "
                '"zero_force_ds_cpu_optimizer": true in the config takes them, and compiles them on first use.',
                offload,
                type(optimizer).__name__,
            )
        return optimizer

    def _schedule(self, scheduler: Any, optimizer: Optimizer, engine: Any) -> Any:
        if isinstance(scheduler, DummyScheduler):
            if engine.lr_scheduler is None:
                raise ValueError(
                    f"DummyScheduler stands in for the scheduler of DeepSpeed's config, and {self.plugin.source} has "
                    "none: write one, or give lr_scheduler_callable."
                )
            return DeepSpeedSchedulerWrapper(engine.lr_scheduler, engine.optimizer)
        if isinstance(optimizer, DummyOptim):
            raise ValueError(
                f"{type(scheduler).__name__} was made for a DummyOptim, which prepare() has replaced. Give "
                "DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...), which makes it then."
            )
        return scheduler

    # --- the step ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass with the engine of the loss's model; other engines in its graph get gradients too."""
        options.pop("scale_wrt_gas", None)  # the loss is already scaled to its share of the step
        engines = self.engines()
        behind = engines if len(engines) == 1 else engines_of_loss(loss, engines)
        if not behind:
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        behind[0].backward(loss, **options)
        for other in behind[1:]:
            other.mark_gradients()

    def scale_gradients(self, models: Iterable[nn.Module], factor: Tensor) -> None:
        """Multiply the accumulated gradients."""
        modules = {id(model) for model in models}
        for engine in self.engines():
            if id(engine.engine) in modules:
                engine.scale(factor)

    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Clip the next step of the engine that owns these parameters; return the norm before clipping."""
        given = {id(param) for param in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for engine in self.engines():
            own = {id(param) for param in engine.engine.module.parameters() if param.requires_grad}
            if not own & given:
                continue
            if norm_type != 2 or not own <= given:
                raise UnsupportedSettingError(
                    f"clip_grad_norm_ with norm_type={norm_type} and {len(own & given)} of {len(own)} parameters",
                    "DeepSpeed clips all gradients of a model together, by their 2-norm.",
                    "Give model.parameters() of one model.",
                )
            return engine.clip(max_norm)
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    # --- state ------------------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state of a model; if it is partitioned, only the main process gets it."""
        engine = self._engine_of(model)
        if engine is None or not (engine.zero_optimization_partition_weights() or engine.autotp_size() > 1):
            return model.state_dict()
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                f"The weights of ZeRO-3 are in partitions, and {GATHER_ON_SAVE} is false in DeepSpeed's config. Set it "
                "to true, or zero3_save_16bit_model=True, or gather them from a checkpoint by zero_to_fp32.py."
            )
        state: dict[str, Any] | None = engine._consolidated_16bit_state_dict()
        return state or {}

    def _engine_of(self, model: nn.Module) -> Any:
        return next((engine for engine in self._all_engines if model in (engine, engine.module)), None)

    def engine_states(self, models: Sequence[nn.Module]) -> list[EngineState | None]:
        """Return the engine state of each model and its optimizer; None for models without an engine."""
        from .state import DeepSpeedState

        found = [self._engine_of(model) for model in models]
        return [None if engine is None else DeepSpeedState(engine) for engine in found]


def load_deepspeed(runtime: Runtime) -> Any:
    """Import DeepSpeed and initialise it with this process's group and device."""
    if not has_package("deepspeed"):
        raise ImportError(
            "DeepSpeed is configured and not installed: pip install 'meshwright[deepspeed]'. On CPU: "
            "DS_BUILD_OPS=0 pip install deepspeed ninja."
        )
    if compare_versions("deepspeed", "<", OLDEST):
        raise ImportError(f"DeepSpeed {OLDEST} or newer is needed: pip install --upgrade deepspeed.")
    if devices.is_cpu(runtime.device) and read("DS_ACCELERATOR") is None:
        export({"DS_ACCELERATOR": "cpu"})
    if read("LOCAL_RANK") is None:
        export({"LOCAL_RANK": str(runtime.local_process_index)})
    if not dist.is_initialized():  # DeepSpeed needs a group; the library makes none for one process
        dist.init_process_group(
            "gloo" if devices.is_cpu(runtime.device) else None, store=HashStore(), rank=0, world_size=1
        )
        runtime.owns_group = True
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.git_version_info import installed_ops

    if not installed_ops.get(_COMPILED_ON_FIRST_USE, False):
        # It is compiled on first use, and a run that is killed meanwhile leaves a lock that hangs all later runs.
        deepspeed.ops.__compatible_ops__[_COMPILED_ON_FIRST_USE] = False
    if comm.cdb is not None and getattr(comm, "_group_of_accelerate", None) is not dist.group.WORLD:
        _reset_groups(comm)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    comm._group_of_accelerate = dist.group.WORLD
    return deepspeed


def _reset_groups(comm: Any) -> None:
    """Reset DeepSpeed's global groups, which belong to a destroyed process group."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    comm.cdb = None
    # Processes compare parameter and module ids, whose counters may differ between processes.
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    for name, value in list(vars(groups).items()):
        if name.startswith("_") and name.endswith(("_GROUP", "_RANKS")):
            setattr(groups, name, {} if isinstance(value, dict) else None)


def _groups(optimizer: DummyOptim) -> list[dict[str, Any]]:
    """Return the parameter groups with the options that differ from the defaults; the rest is in the config."""
    if len(optimizer.param_groups) == 1:
        return [param for group in optimizer.param_groups for param in group["params"]]
    return [
        {name: value for name, value in group.items() if name == "params" or value != optimizer.defaults.get(name)}
        for group in optimizer.param_groups
    ]


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's CPU optimizer with the same parameter groups, or the optimizer itself if there is none."""
    fused = optimizer
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        options = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        fused = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW), **options)
    elif isinstance(optimizer, torch.optim.Adagrad):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        fused = DeepSpeedCPUAdagrad(optimizer.param_groups)
    else:
        logger.warning("DeepSpeed has no optimizer like %s for states on the host.", type(optimizer).__name__)
    return fused


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the plugin that the next model uses."""
    plugin = state.deepspeed_plugin
    if not isinstance(plugin, DeepSpeedPlugin):
        raise ValueError("DeepSpeed is not configured: pass Accelerator(deepspeed_plugin=...).")
    return plugin
