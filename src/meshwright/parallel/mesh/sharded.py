"""Models on a device mesh: tensor parallelism, FSDP2 sharding, and replication."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...errors import UnsupportedSettingError
from ...errors.callers import warn
from ...precision import quantized
from ...runtime.devices.device import moves_in_place
from ...runtime.group.mesh import Mesh
from ...runtime.group.runtime import Runtime
from ..base import Capabilities, Steps, Strategy, params_of
from ..modules import materialising
from ..modules.averaging import UnshardedParameters, broadcast_parameters
from ..modules.dtensors import any_dtensor, distribute_like, gathered, local, mesh_of, whole
from ..modules.gradient_hooks import refuse_graphs_of_gradients, run_on_gathered
from ..modules.means import LateNumbers, divisors_of
from ..modules.memory.activations import CheckpointedForward, refuse_recomputed
from ..modules.references import optimizers_in, spread_copies
from ..modules.spread import DTENSORS, FULLY_SHARD, Layout, Ranks, fsdp_modules, layout_of, rows_of, sharding_ranks
from ..modules.unwrapping import own_name
from ..modules.wrapping import ignored_modules, parameters_in, units_of
from .context.positions import PositionCheck
from .context.sequences import SequenceAxis
from .experts.balance import expert_counts
from .experts.dispatch import SpreadForward
from .experts.spreading import ExpertParallel
from .matrices.stepping import follow, refuse_vectors
from .matrices.trial import require_right_on_spread
from .tensor.plans import complete_gradients_of_split, split_layers
from .tensor.transformers_styles import sum_each_gradient_once

logger = logging.getLogger(__name__)

_MAX_DIVISORS = 4


class MeshParallel(Strategy):
    """Distribute models over one mesh: FSDP2, HSDP, tensor parallelism and their combinations."""

    mesh: Mesh

    def __init__(self, runtime: Runtime, mesh: Mesh, plugin: FullyShardedDataParallelPlugin) -> None:
        super().__init__(runtime)
        self.mesh = mesh
        self.plugin = plugin
        shards = mesh.sharding is not None
        if plugin.offloads and not shards:
            raise UnsupportedSettingError(
                "cpu_offload=True (optimizer_cpu_offload of Megatron-LM) with one process per copy",
                "FSDP2 offloads its shards, and no axis of this mesh shards.",
                "Leave it out, or use more processes: dp_shard_size.",
            )
        self.capabilities = Capabilities(defers_sync=shards)
        self._unsharded: MutableMapping[nn.Module, UnshardedParameters] = WeakKeyDictionary()
        # The sharded modules of models that came sharded only in parts.
        self._parts: MutableMapping[nn.Module, list[FSDPModule]] = WeakKeyDictionary()
        self._sequences = self._sequence_axis()
        self._position_checks: MutableMapping[nn.Module, PositionCheck] = WeakKeyDictionary()
        self._items = LateNumbers()
        self._has_warned_of_means = False
        self._expert_parallel = ExpertParallel(mesh) if mesh.config.ep_enabled else None
        self._experts: MutableMapping[nn.Module, list[SpreadForward]] = WeakKeyDictionary()
        self._tried: WeakSet[torch.optim.Optimizer] = WeakSet()

    def _sequence_axis(self) -> SequenceAxis | None:
        """Return the axis over which sequences are divided, if there is one."""
        config = self.mesh.config
        if not config.cp_enabled and not config.sp_enabled:
            return None
        handler = config.cp_handler if config.cp_enabled else None
        return SequenceAxis(
            self.mesh.axis("cp" if config.cp_enabled else "sp"),
            rotation=None if handler is None else handler.cp_comm_strategy,
            in_stages=config.pp_enabled,
            check_group=self.gradient_group,
        )

    # --- groups -----------------------------------------------------------------------------------------------------

    @property
    def num_data_ranks(self) -> int:
        """Return the number of processes that see different samples."""
        return self.mesh.num_data_ranks

    @property
    def data_rank(self) -> int:
        """Return this process's rank among those that see different samples."""
        return self.mesh.data_rank

    @property
    def data_group(self) -> Any:
        """The processes that see different samples."""
        return self.mesh.data_group

    @property
    def num_gradient_shares(self) -> int:
        """Return the number of processes that gradients are averaged over."""
        return self.mesh.num_token_ranks

    @property
    def replicas(self) -> tuple[Sequence[int], Any]:
        """The ranks along `dp_replicate`: each has the same shards."""
        if self.mesh.size("dp_replicate") == 1:
            return (), None
        group = self.mesh.axis("dp_replicate").get_group()
        return dist.get_process_group_ranks(group), group

    @property
    def gradient_group(self) -> Any:
        """The processes over which gradients are averaged."""
        return self.mesh.token_group

    # --- prepare ----------------------------------------------------------------------------------------------------

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        config = self.mesh.config
        axes = [*config.active_mesh_dims, *(["ep"] if config.ep_enabled else [])]
        return f"the mesh ({', '.join(f'{axis}={config.size(axis)}' for axis in axes)})"

    @property
    def split_ranks(self) -> Ranks:
        """The ranks over which layers are split."""
        return next(iter(rows_of(self.mesh.axis("tp"))), ()) if self.mesh.size("tp") > 1 else ()

    def admit(self, model: nn.Module, *, evaluation: bool = False) -> Layout:
        """Refuse a model that is spread in another way; the Trainer of transformers trains one for evaluation."""
        layout = super().admit(model, evaluation=evaluation)
        if evaluation and layout.splits and self.split_ranks:
            sum_each_gradient_once(model, self.mesh.axis("tp"))
        return layout

    def fits(self, layout: Layout, model: nn.Module) -> bool:
        """Return whether a model is sharded, or at least split, over the ranks of this mesh."""
        if layout.oddity or self.mesh.config.ep_enabled or layout.splits != {self.split_ranks} - {()}:
            return False
        if layout.by == DTENSORS:
            return bool(layout.splits)
        sharding = self.mesh.sharding
        return (
            layout.by == FULLY_SHARD
            and sharding is not None
            and (layout.copies, layout.shards) == sharding_ranks(sharding)
        )

    def _place(self, model: nn.Module) -> None:
        """Leave a model in place if it is sharded: its units are moved one by one."""
        if self.mesh.sharding is None:
            super()._place(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Apply tensor parallelism, activation checkpointing and sharding in place, each if configured."""
        model = self._parallelize(model, self.steps or Steps(recompute=self.recompute, shard=self.shard))
        if any_dtensor(model.parameters()):
            refuse_graphs_of_gradients(model, self.asks_for)
        self._register_position_check(model)
        return model

    def _register_position_check(self, model: nn.Module) -> None:
        """Check how a model treats positions. Register it after sharding, so that this hook runs first."""
        if self._sequences is not None:
            self._position_checks[model] = self._sequences.watch(model)

    def _parallelize(self, model: nn.Module, steps: Steps) -> nn.Module:
        before = dict(model.named_parameters(remove_duplicate=False))
        tp = self.mesh.axis("tp") if self.mesh.size("tp") > 1 else None
        layout = layout_of(model)
        if self._sequences is not None:
            self._sequences.require(model)
        if tp is not None or self._expert_parallel is not None:
            quantized.refuse_quantized(
                model,
                self.asks_for,
                "layers and experts are split along their rows and columns, which packed weights do not have.",
                "Shard them: dp_shard_size.",
            )
        if self._expert_parallel is not None:
            self._experts[model] = self._expert_parallel.spread(model)
        if tp is not None and layout.by:
            complete_gradients_of_split(model, tp)
        elif tp is not None:
            handler = self.mesh.config.tp_handler
            by_sequence = handler is not None and handler.sequence_parallel
            split_layers(
                model,
                self.mesh.config.tp_plan,
                tp,
                sequence_parallel=by_sequence,
                except_for=[forward.name for forward in self._experts.get(model, ())],
            )
        if self.plugin.activation_checkpointing:
            model = steps.recompute(model)
        if layout.by == FULLY_SHARD:
            self._keep_sharded(model, layout)
        elif self.mesh.sharding is not None:
            model = steps.shard(model)
        self._record_successors(before, model)
        return model

    def _keep_sharded(self, model: nn.Module, layout: Layout) -> None:
        """Use a model in the shards that it has; average the gradients of parameters outside of them."""
        if self.runtime.is_main_process:
            logger.info(
                "%s is sharded already, over the ranks that this mesh shards over, and is used as it is. Its units, "
                "precision and offload are those of its fully_shard() calls, not those of the plugin.",
                type(model).__name__,
            )
        quantized.keep_scales(model, self.runtime.device)
        self._keep_unsharded(model, list(layout.whole))
        self._copy_from_first(model, [])
        if not isinstance(model, FSDPModule):
            self._parts[model] = [cast(FSDPModule, part) for part in fsdp_modules(model)]

    def _record_successors(self, before: dict[str, nn.Parameter], model: nn.Module) -> None:
        """Record which parameters were replaced by new ones."""
        for name, param in model.named_parameters(remove_duplicate=False):
            old = before.get(own_name(name))
            if old is not None and old is not param:
                self._succeed(old, param)

    def recompute(self, model: nn.Module) -> nn.Module:
        """Apply activation checkpointing to the units of a model."""
        return self._recompute(model, units_of(model, self.plugin))

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place."""
        before = dict(model.named_parameters(remove_duplicate=False))
        self._shard(model, units_of(model, self.plugin))
        self._record_successors(before, model)
        return model

    def _steps_over(self, units: list[nn.Module]) -> Steps:
        """Return the steps for a model with these units."""
        return Steps(
            recompute=lambda model: self._recompute(model, units), shard=lambda model: self._shard(model, units)
        )

    def _recompute(self, model: nn.Module, units: list[nn.Module]) -> nn.Module:
        if not units:
            raise ValueError(
                "activation_checkpointing recomputes the blocks of a model, and none were found: name them by "
                "transformer_cls_names_to_wrap."
            )
        for unit in units:
            refuse_recomputed(unit, "activation_checkpointing")
            unit.forward = CheckpointedForward(unit.forward, offload=bool(self.plugin.activation_checkpointing_offload))
        return model

    def _shard(self, model: nn.Module, units: list[nn.Module]) -> nn.Module:
        plugin = self.plugin
        ignored = ignored_modules(model, plugin)
        scalars = _scalars(model)
        inner, outer = self._unit_options()
        has_scales = self._ready_quantized(model)
        from_first = bool(plugin.cpu_ram_efficient_loading) and not has_scales
        state = materialising.to_meta(model) if from_first else {}
        fresh = not from_first and materialising.has_no_weights(model)
        ties = materialising.Ties(model)
        experts = self._experts.get(model, [])
        apart = set() if self._expert_parallel is None else self._expert_parallel.shard(experts, inner, ignored)
        for unit in [*_outside(experts, units), model]:
            if fresh:
                materialising.initialise(unit, self.runtime.device, plugin.param_init_fn)
                ties.restore(model)
            elif not moves_in_place(self.runtime.device):  # fully_shard would try to
                unit.to(self.runtime.device)
                ties.restore(model)
            whole_params = quantized.whole_weights(model) if has_scales else []
            unsharded = _unsharded(model, ignored, scalars)  # materialising makes new ones
            ignored_params = apart.union(unsharded, whole_params) or None
            fully_shard(unit, ignored_params=ignored_params, **(outer if unit is model else inner))
        if plugin.reshard_after_forward:
            model.register_forward_hook(_reshard_without_backward)
        if from_first:
            materialising.load_from_rank_zero(model, state, self.runtime.device, offload=plugin.offloads)
        if has_scales:
            quantized.keep_scales(model, self.runtime.device)
            quantized.require_equal_scales(model, self.gradient_group, self.runtime.device)
        self._keep_unsharded(model, _unsharded(model, ignored, scalars))
        if not from_first:
            self._copy_from_first(model, parameters_in(forward.module for forward in experts))
        run_on_gathered(model, fsdp_modules(model))
        return model

    def _ready_quantized(self, model: nn.Module) -> bool:
        """Make quantised weights ready to be sharded; return whether there are any. Every process has loaded them."""
        if not quantized.quantized_parameters(model):
            return False
        quantized.refuse_without_values(model)
        policy = self.plugin.mixed_precision_policy
        quantized.ready_to_shard(model, None if policy is None else policy.param_dtype, self.runtime.device)
        return True

    def _copy_from_first(self, model: nn.Module, experts: list[nn.Parameter]) -> None:
        """Give all copies of a model the values of the first one."""
        if self.mesh.size("dp_replicate") == 1:
            return
        apart = set(experts)
        shards = [param for param in model.parameters() if mesh_of(param) is not None and param not in apart]
        broadcast_parameters(shards, self.mesh.axis("dp_replicate").get_group(), self.runtime.device)
        if self._expert_parallel is not None:
            self._expert_parallel.copy_from_first(experts, self.runtime.device)

    def _unit_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of `fully_shard` for the units of a model, and for the model itself."""
        reshard = self.plugin.reshard_after_forward
        policy = self.plugin.mixed_precision_policy
        options: dict[str, Any] = {"mesh": self.mesh.sharding, "offload_policy": self._offload_policy()}
        inner = {**options, "reshard_after_forward": reshard}
        # The backward pass starts with the outermost unit: it would be gathered again right after it was freed.
        outer = {**options, "reshard_after_forward": None if reshard is True else reshard}
        if policy is not None:
            inner["mp_policy"] = replace(policy, output_dtype=None)
            outer["mp_policy"] = policy
        return inner, outer

    def _keep_unsharded(self, model: nn.Module, params: list[nn.Parameter]) -> None:
        """Move unsharded parameters to the device, and average their gradients."""
        for param in params:
            param.data = param.data.to(self.runtime.device)
        if params:
            self._unsharded[model] = UnshardedParameters(params, self.gradient_group, self.runtime.device)

    def _offload_policy(self) -> Any:
        policy = self.plugin.cpu_offload
        if isinstance(policy, CPUOffloadPolicy) and not torch.accelerator.is_available():
            return CPUOffloadPolicy(pin_memory=False)  # pinning needs a device to copy to
        return policy

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        super()._rebind(optimizer)
        if not any_dtensor(params_of(optimizer)):
            return
        optimizers = optimizers_in(optimizer)
        steps = [(each, found) for each in optimizers if (found := follow(each)) is not None]

        def is_whole(mapping: Any, param: Tensor) -> bool:
            return any(mapping is each.state and found.takes(param) for each, found in steps)

        spread_copies(optimizer, distribute_like, is_whole)
        for each in optimizers:
            refuse_vectors(each)
            _fit_kernels(each)
        if optimizer not in self._tried:
            require_right_on_spread(optimizer, stepped_whole=[each for each, _ in steps])
            self._tried.add(optimizer)

    # --- the step ---------------------------------------------------------------------------------------------------

    def objection_to_early_steps(self, params: Sequence[Tensor]) -> str | None:
        """Refuse parameters whose gradients FSDP2 or autograd do not complete themselves."""
        if self.plugin.offloads:
            return "cpu_offload=True copies gradients to the host while the backward pass goes on."
        if self._expert_parallel is not None:
            return f"experts are spread (ep_size={self.mesh.size('ep')}), and it was not tried with them."
        own = {id(param) for param in params}
        if any(id(param) in own for unsharded in self._unsharded.values() for param in unsharded.params):
            return "gradients of ignored_modules are averaged after the backward pass."
        return None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Keep gradients unsharded and unreduced inside the context."""
        return self._gradient_sync(model, False)

    def resume_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Reduce gradients in the next backward pass although its forward pass ran in `no_sync`."""
        return self._gradient_sync(model, True)

    @contextmanager
    def _gradient_sync(self, model: nn.Module, synchronises: bool) -> Iterator[None]:
        parts = [model] if isinstance(model, FSDPModule) else self._parts.get(model, ())
        unsharded = self._unsharded.get(model)
        for part in parts:
            part.set_requires_gradient_sync(synchronises)
        try:
            with nullcontext() if unsharded is None else unsharded.averaging(synchronises):
                yield
        finally:
            for part in parts:
                part.set_requires_gradient_sync(True)

    def split_sequences(
        self, buffers: Sequence[Tensor], dims: Sequence[int], no_restore: set[Tensor] | None
    ) -> AbstractContextManager[object]:
        """Return a context in which sequences are divided over the `cp` or the `sp` axis, if there is one."""
        return nullcontext() if self._sequences is None else self._sequences.dividing(buffers, dims, no_restore)

    @property
    def batch_division(self) -> SequenceAxis | None:
        """What divides the batches of loaders: the `sp` axis."""
        return self._sequences if self._sequences is not None and self._sequences.by_heads else None

    @torch.no_grad()
    def check_mean_loss(self, loss: Tensor) -> None:
        """Warn once, at the script's line, if shards of a sequence average over different numbers of items.

        On a device the numbers of a step are looked at in a later one. All processes therefore go on to exchange them.
        """
        sequences = self._sequences
        if sequences is None or sequences.buffers is None:
            return
        counts = torch.zeros(_MAX_DIVISORS, device=self.runtime.device)
        for place, divisor in zip(counts, divisors_of(loss), strict=False):
            place.fill_(whole(divisor))
        extremes = torch.cat([counts, -counts])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=sequences.group)
        found = self._items.exchange(extremes)
        if found is None or self._has_warned_of_means:
            return
        for high, low in zip(found[:_MAX_DIVISORS], found[_MAX_DIVISORS:], strict=True):
            if high != -low:
                self._has_warned_of_means = True
                warn(
                    f"The loss is a mean over {-low:g} items on one process and over {high:g} on another of those that "
                    "share a sequence, and each has the same weight: gradients are not those of the whole sequence. "
                    "Give the sum and the number of items here: accelerator.backward(loss_sum, num_items=n)."
                )
                return

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients by their norm over all shards; return the norm before clipping."""
        params = self.current(parameters)
        given = [params] if isinstance(params, Tensor) else list(params)
        by_mesh: dict[Any, list[Tensor]] = {}
        for param in given:
            if param.grad is not None:
                by_mesh.setdefault(mesh_of(param.grad), []).append(param)
        norms = [
            whole(torch.nn.utils.get_total_norm([param.grad for param in group], norm_type))  # type: ignore[misc]
            for group in by_mesh.values()
        ]
        total = self._total_norm(norms, norm_type)
        shards = [_LocalGradient(local(param.grad)) for param in given if param.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total)  # type: ignore[arg-type]
        return total

    @torch.no_grad()
    def clip_grad_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut the elements of local shards: torch's kernel takes DTensors or plain tensors, not both."""
        params = self.current(parameters)
        given = [params] if isinstance(params, Tensor) else list(params)
        for param in given:
            gradient: Any = param.grad
            if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
                spread: Any = param
                param.grad = gradient.redistribute(placements=spread.placements)
        shards = [_LocalGradient(local(param.grad)) for param in given if param.grad is not None]
        torch.nn.utils.clip_grad_value_(shards, clip_value)  # type: ignore[arg-type]

    def _total_norm(self, norms: list[Tensor], norm_type: float) -> Tensor:
        """Return the total norm from the norms of the parts."""
        return norms[0] if len(norms) == 1 else norm_of(norms, norm_type).to(self.runtime.device)

    def expert_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return how many tokens each expert got in training since the last call. Collective."""
        return expert_counts(self._experts.get(model, ()), self.runtime.device)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def saves_shards(self) -> bool:
        """Return whether every process saves its own shard."""
        return self.plugin.saves_shards

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Gather a model's state on the main process, one tensor at a time; other processes get an empty dict."""
        state = gathered(model.state_dict())
        if not self.runtime.is_main_process:
            return {}
        return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


@dataclass(frozen=True)
class _LocalGradient:
    """A gradient's local shard in the form that torch clips: DTensors would derive the layout of each result first."""

    grad: Tensor


def _fit_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Turn off kernels of several tensors that cannot take the parameters of an optimizer together."""
    meshes = {mesh_of(param) for param in params_of(optimizer)}
    for group in optimizer.param_groups:
        if "foreach" in group and len(meshes) > 1:  # these take one mesh at a time
            group["foreach"] = False
        if group.get("fused") and len(meshes) > 1 and None in meshes:  # these take DTensors, or plain tensors
            group["fused"] = False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def norm_of(norms: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of norms."""
    if not norms:
        return torch.zeros(())
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else torch.linalg.vector_norm(stacked, norm_type)


def _outside(experts: Iterable[SpreadForward], units: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the units that are not experts, nor inside of them."""
    inside = {module for forward in experts for module in forward.module.modules()}
    return [unit for unit in units if unit not in inside]


def _scalars(model: nn.Module) -> list[str]:
    """Return the names of the parameters without dimensions, which `fully_shard` refuses."""
    return [name for name, param in model.named_parameters() if param.dim() == 0]


def _unsharded(model: nn.Module, ignored: Iterable[nn.Module], scalars: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of modules, and those with these names."""
    return list(dict.fromkeys([*parameters_in(ignored), *map(model.get_parameter, scalars)]))


def _reshard_without_backward(model: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()
