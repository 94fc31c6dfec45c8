"""Models on XLA devices: on one, or over an SPMD mesh of all devices of this process.

In SPMD mode the program is that of one device. Tensors carry a sharding, and XLA's compiler spreads the computation and
adds the communication. Parameters are sharded as torch_xla's FSDPv2 shards them: by their first dimension over the axis
`fsdp`, with the outputs of every unit sharded over the batch. Its wrapper module is not used, so that names stay the
user's. Batches are sharded by the loaders.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...config.plugins.parallelism import ParallelismConfig
from ...config.plugins.sharding import FullyShardedDataParallelPlugin
from ...errors import UnsupportedSettingError
from ...runtime.collectives.nested import tensors_of
from ...runtime.devices import xla
from ...runtime.group.runtime import Runtime
from ...runtime.loop.gradient_state import GradientState
from ..base import Bundle, Capabilities, Strategy
from ..modules.wrapping import ignored_modules, parameters_in, units_of

logger = logging.getLogger(__name__)

REPLICATE, SHARD = "dp_replicate", "fsdp"


class XlaDevices(Strategy):
    """Train on XLA devices; every optimizer step is one graph. See [Note: graphs] in `runtime/devices/xla.py`."""

    capabilities = Capabilities()

    def __init__(
        self,
        runtime: Runtime,
        plugin: FullyShardedDataParallelPlugin | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(runtime)
        self.plugin = plugin or FullyShardedDataParallelPlugin()
        axes = axes_for(runtime, plugin, parallelism)
        self.spmd_mesh = xla.spmd_mesh(axes) if axes else None
        self.shards = axes.get(SHARD, 1) > 1
        if self.shards:
            refuse_settings(self.plugin)
        xla.begin_loop(self.spmd_mesh)

    @property
    def published(self) -> dict[str, Any]:
        """Attributes of `AcceleratorState`."""
        return {"fsdp_plugin": self.plugin} if self.shards else {}

    @property
    def asks_for(self) -> str:
        """How this strategy spreads a model, in words."""
        axes = dict(zip(self.spmd_mesh.axis_names, self.spmd_mesh.mesh_shape, strict=True)) if self.spmd_mesh else {}
        named = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        return f"the SPMD mesh ({named}) of XLA devices" if axes else "a plain model on each XLA device"

    def prepare(self, bundle: Bundle) -> Bundle:
        """Place the models, and let every optimizer's step end a graph."""
        prepared = super().prepare(bundle)
        for optimizer in prepared.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            if self.shards:
                optimizer.register_load_state_dict_post_hook(self._shard_state)
        return prepared

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the parameters of a model in place, or give all processes those of the first."""
        if self.shards:
            self._shard_model(model)
        elif self.runtime.num_processes > 1:
            xla.broadcast_parameters(model)
        return model

    def _shard_model(self, model: nn.Module) -> None:
        ignored = {id(param) for param in parameters_in(ignored_modules(model, self.plugin))}
        for param in model.parameters():
            if param.dim() and id(param) not in ignored:
                xla.shard(param, self.spmd_mesh, SHARD)
        model.register_load_state_dict_post_hook(_upload)  # type: ignore[no-untyped-call]
        _upload()
        units = units_of(model, self.plugin)
        for unit in units:
            xla.separate_backward(unit)
        for unit in (*units, model):
            unit.register_forward_hook(partial(_shard_outputs, self.spmd_mesh))

    def _shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Shard a loaded state like the parameters; torch has put it whole on their device."""
        for param, state in optimizer.state.items():
            if xla.sharding_of(param):
                for value in state.values():
                    if isinstance(value, Tensor) and value.shape == param.shape:
                        xla.shard(value, self.spmd_mesh, SHARD)
        _upload()

    # --- the step -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward pass; what it adds to the gradients is not averaged yet."""
        GradientState().is_xla_gradients_synced = False
        super().backward(loss, **options)

    def complete_gradients(self) -> None:
        """Average the gradients over the processes, once per step."""
        state = GradientState()
        if not state.is_xla_gradients_synced and self.runtime.num_processes > 1:
            for optimizer in self._optimizers:
                xla.reduce_gradients(optimizer)
        state.is_xla_gradients_synced = True

    def _before_step(self, *_: Any) -> None:
        self.complete_gradients()

    def _after_step(self, *_: Any) -> None:
        GradientState().is_xla_gradients_synced = False
        xla.loop.end_step()


def axes_for(
    runtime: Runtime, plugin: FullyShardedDataParallelPlugin | None, parallelism: ParallelismConfig | None
) -> dict[str, int]:
    """Return the axes of the SPMD mesh over the devices of this process; none for one device."""
    devices = xla.device_count()
    asks = plugin is not None or (parallelism is not None and parallelism.active_mesh_dims)
    if asks and runtime.num_processes > 1:
        raise UnsupportedSettingError(
            f"a mesh over {runtime.num_processes} processes on XLA",
            "torch_xla has started a process for every device, and SPMD has one process for all devices.",
            "Start one process, or leave fsdp_plugin and parallelism_config out.",
        )
    if parallelism is not None and parallelism.active_mesh_dims:
        parallelism.fitted(devices)
        if devices == 1:
            return {}
        return {REPLICATE: parallelism.size("dp_replicate"), SHARD: parallelism.size("dp_shard")}
    if devices > 1 and (asks or xla.is_spmd()):
        return {REPLICATE: 1, SHARD: devices} if plugin is not None else {REPLICATE: devices, SHARD: 1}
    if plugin is not None:
        logger.info("There is one XLA device: nothing is sharded, and the settings of FSDP have no effect.")
    return {}


def refuse_settings(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse the settings of FSDP that the compiler of XLA does not follow."""
    given = {
        "cpu_offload": plugin.offloads,
        "activation_checkpointing": plugin.activation_checkpointing,
        "mixed_precision_policy": plugin.mixed_precision_policy is not None,
        "param_init_fn": plugin.param_init_fn is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedSettingError(
                f"FullyShardedDataParallelPlugin({name}=...) on XLA",
                "XLA's compiler decides where tensors are and when they are computed.",
                'Leave it out. mixed_precision="bf16" of Accelerator computes in bf16.',
            )


def _upload(*_: Any) -> None:
    """Send shards to their devices now. When they are read, or overwritten, XLA would replicate uneven ones."""
    xla.sync()


def _shard_outputs(mesh: Any, module: nn.Module, args: Any, outputs: Any) -> None:
    """Shard the outputs of a unit over the batch, so that the compiler gathers weights and not activations."""
    for tensor in tensors_of(outputs):
        if tensor.dim():
            xla.shard(tensor, mesh, mesh.axis_names)
