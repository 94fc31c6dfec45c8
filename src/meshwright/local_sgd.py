"""Local SGD: processes train independently for some steps, then average their parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .config.combinations import Feature, require_combination
from .parallel.modules.dtensors import any_dtensor

if TYPE_CHECKING:
    from .accelerator import Accelerator


class LocalSGD:
    """Average a model's parameters every `local_sgd_steps` steps instead of its gradients at every step."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps must be 1 or more, not {local_sgd_steps}.")
        if enabled:
            require_combination({Feature.LOCAL_SGD: "LocalSGD"} | accelerator.features)
        has_copies = accelerator.strategy.capabilities.defers_sync and not any_dtensor(model.parameters())
        if enabled and accelerator.use_distributed and not has_copies:
            raise ValueError(
                f"LocalSGD needs whole copies of the model on every process; {accelerator.distributed_type} has none, "
                "or the model is sharded."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._no_sync: AbstractContextManager[object] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._no_sync is not None:
            if error is None:
                self._average_parameters()
            self._no_sync.__exit__(kind, error, trace)
            self._no_sync = None

    def step(self) -> None:
        """Count an optimizer step; average when it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_parameters()

    @torch.no_grad()
    def _average_parameters(self) -> None:
        """Average all parameters in one collective."""
        parameters = [param for param in self.model.parameters() if param.requires_grad]
        for group in _by_dtype(parameters):
            flat = torch.cat([param.reshape(-1) for param in group])
            dist.all_reduce(flat)
            flat /= self.accelerator.num_processes
            for param, averaged in zip(group, torch.split(flat, [param.numel() for param in group]), strict=True):
                param.copy_(averaged.view_as(param))


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in parameters:
        groups.setdefault(param.dtype, []).append(param)
    return list(groups.values())
