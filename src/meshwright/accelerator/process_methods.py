"""What an Accelerator says of its process and its settings, and what its processes do together: all of it delegated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config.enums import DistributedType, FP8BackendType
from ..config.environment import read_setting
from ..config.plugins.handlers import DataLoaderConfiguration, ProjectConfiguration
from ..parallel.base import Strategy
from ..precision import FullPrecision
from ..runtime.collectives import operations as collectives
from ..state import AcceleratorState

if TYPE_CHECKING:
    from ..optimizer import AcceleratedOptimizer
    from ..parallel.replicas.checksums import PeriodicComparison


class ProcessMethods:
    """The part of `Accelerator` that looks and asks: rank, device, settings, and collectives over all processes."""

    state: AcceleratorState
    strategy: Strategy
    precision: FullPrecision
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    flag_tensor: Tensor | None
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _comparison: PeriodicComparison | None = None

    # --- who am I -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """Return how the processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Return the number of processes."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """Return the rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """Return the rank of this process on its host."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Tell whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Tell whether this is the first process of its host."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Tell whether this is the highest rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Tell whether there are several processes."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Tell whether several processes each have an accelerator."""
        return self.use_distributed and self.distributed_type != DistributedType.MULTI_CPU

    @property
    def mixed_precision(self) -> str:
        """Return the number format of the forward pass."""
        return self.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Return who computes in fp8."""
        return self.precision.fp8_backend

    @property
    def split_batches(self) -> bool:
        """Tell whether a loader's batch is cut among the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Tell whether one process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Tell whether the last batches are filled up so that all processes take equally many steps."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Tell whether shuffling is a function of seed and epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Tell whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Tell whether torchdata's stateful loader is used."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Return the run's directory."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Return the run's logging directory."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Return the number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def parallelism_config(self) -> Any:
        """Return the mesh configuration: None for plain data parallelism."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """Return the device mesh: None for plain data parallelism."""
        return self.state.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """Return this process's number among those that split its layers."""
        return self._rank_along("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Return the number of this process's stage."""
        return self._rank_along("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Return this process's number among those that split its sequences."""
        return self._rank_along("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Return this process's number among those that see different samples."""
        return self.strategy.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """Return this process's number among those that share one copy of the model."""
        return self._rank_along("dp_shard")

    def _rank_along(self, axis: str) -> int:
        mesh = self.torch_device_mesh
        return 0 if mesh is None or axis not in mesh.mesh_dim_names else int(mesh.get_local_rank(axis))

    @property
    def is_fsdp2(self) -> bool:
        """Tell whether models are sharded by FSDP2."""
        return bool(self.state.is_fsdp2)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the loss scaler of fp16, or None."""
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.scaler = scaler

    # --- processes together ---------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 run the block before the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of every host run the block before the others."""
        return self.state.local_main_process_first()

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function on rank 0 only.

        Args:
            function: The function.
        """
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function once per host.

        Args:
            function: The function.
        """
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Run the decorated function on the highest rank only.

        Args:
            function: The function.
        """
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Run the decorated function on one rank only.

        Args:
            function: The function; without it a decorator is returned.
            process_index: The rank.
        """
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Run the decorated function on one local rank of every host only.

        Args:
            function: The function; without it a decorator is returned.
            local_process_index: The local rank.
        """
        return self.state.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Yield this process's part of the inputs.

        Args:
            inputs: A list, tuple, tensor, data set, or dict of equally long ones.
            apply_padding: Whether the last element is repeated, so that all parts are equally long.
        """
        return self.state.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per host.

        Args:
            *args: As for Python's `print`.
            **kwargs: As for Python's `print`.
        """
        self.state.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Raise a flag on this process that every process sees at the next `check_trigger`."""
        self.flag_tensor = torch.ones((), dtype=torch.int64, device=self.device)

    def check_trigger(self) -> bool:
        """Tell whether any process raised its flag since the last check; lowers all flags. Call it on every process."""
        flag = (
            self.flag_tensor if self.flag_tensor is not None else torch.zeros((), dtype=torch.int64, device=self.device)
        )
        self.flag_tensor = None
        return bool(collectives.reduce(flag, reduction="sum").item())

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes, in rank order.

        Args:
            tensor: A tensor, or a nested list, tuple or dict of tensors, with the same shapes on every process.
        """
        return collectives.gather(tensor)

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Sum or average the tensors of all processes.

        Args:
            tensor: A tensor, or a nested list, tuple or dict of tensors, with the same shapes on every process.
            reduction: "sum", "mean", "max" or "min"; "none" combines nothing.
            scale: A factor for the result.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad the tensors of all processes to the longest, so that they can be gathered.

        Args:
            tensor: A tensor, or a nested list, tuple or dict of tensors.
            dim: The dimension that differs.
            pad_index: The value that fills up.
            pad_first: Whether it is put in front instead of behind.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def check_replicas(self, every: int | None = None) -> None:
        """Compare the parameters of all replicas bitwise, and raise an error that names the rank that differs.

        Every process must call it. Replicas are the processes of DDP, or those along `dp_replicate`; without any it
        does nothing.

        Args:
            every: Compare after every so many optimizer steps from now on, and not in this call. `meshwright launch
                --check_replicas_every` does the same. Under `--survive` a rank that differs from most is replaced.

        Raises:
            ReplicaMismatchError: on every process, if the parameters of one differ.
        """
        if every is not None:
            self._compare_every(every)
            for optimizer in self._optimizers:
                self._compare_after_steps_of(optimizer)
            return
        self.state._runtime.run_collective(self._compare_replicas)

    def _compare_replicas(self) -> None:
        ranks, group = self.strategy.replicas
        if ranks:
            from ..parallel.replicas.checksums import require_equal_replicas

            require_equal_replicas(self._models, ranks, group, self.device)

    def _compare_every(self, steps: int) -> None:
        from ..parallel.replicas.checksums import PeriodicComparison
        from ..parallel.replicas.surviving import SurvivingReplicas

        self._comparison = PeriodicComparison(steps, self.check_replicas)
        if isinstance(self.strategy, SurvivingReplicas):  # it compares inside of its steps
            self.strategy.compares_every = steps

    def _compare_after_steps_of(self, optimizer: AcceleratedOptimizer) -> None:
        """Let replicas be compared every so many steps of an optimizer, if that was requested."""
        steps = read_setting("check_replicas_every")
        if self._comparison is None and steps is not None:
            self._compare_every(steps)
        if self._comparison is not None and self.strategy.transaction is None:
            self._comparison.follow(optimizer.optimizer)

    # --- experts --------------------------------------------------------------------------------------------------

    def expert_counts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return how many tokens each expert got in training since the last call, over all processes.

        Every process must call it. The result has one tensor per module with experts, by the module's name, and is
        empty where experts are not spread (`ep_size`).

        Args:
            model: A prepared model.
        """
        return self.strategy.expert_counts(model)

    def load_balancing_loss(
        self, router_logits: Tensor | Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return this process's share of the router's loss over the tokens of all processes.

        The mean over processes, which `backward` takes, is the loss of the global batch. A loss that every process
        computes from its own tokens is another one. Every process must call it.

        Args:
            router_logits: Scores of (tokens, experts), or those of several layers, as models of transformers return.
            top_k: Experts that are chosen for each token.
            attention_mask: Ones for the tokens that count, zeros for padding; of as many elements as there are tokens.
        """
        from ..parallel.mesh.experts.balance import load_balancing_loss

        shares, group = self.strategy.num_gradient_shares, self.strategy.gradient_group
        return load_balancing_loss(router_logits, top_k, attention_mask, shares=shares, group=group)
