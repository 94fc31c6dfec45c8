"""The work of one data rank, on a process that believes to be alone: what a mesh is compared with.

One process that did the work of all data ranks would run the script's loop once for each of them in every step: code
that counts iterations, that changes gradients in place or breaks out of the loop would do something else. So every data
rank has a process, which runs the script as one process does, without a mesh: it is number 0 of 1. Two things only are
those of several processes. Its loaders return the batches of its data rank, and after every backward pass gradients are
averaged over the data ranks by one plain sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...parallel.base import params_of
from ...parallel.single import SingleProcess
from ...runtime.group.runtime import Runtime


class OneDataRank(SingleProcess):
    """Train on this process alone, with the batches of one data rank."""

    def __init__(self, runtime: Runtime, data_rank: int, num_data_ranks: int, group: Any) -> None:
        super().__init__(runtime)
        self._data_rank = data_rank
        self._num_data_ranks = num_data_ranks
        self._group = group

    @property
    def num_data_ranks(self) -> int:
        """Return the number of processes that see different samples."""
        return self._num_data_ranks

    @property
    def data_rank(self) -> int:
        """Return this process's rank among those that see different samples."""
        return self._data_rank

    @property
    def data_group(self) -> Any:
        """The processes that see different samples."""
        return self._group

    @property
    def num_gradient_shares(self) -> int:
        """Return the number of processes that gradients are averaged over."""
        return self._num_data_ranks

    @property
    def gradient_group(self) -> Any:
        """The processes over which gradients are averaged."""
        return self._group


def group_of(folder: Path, rank: int, size: int) -> Any:
    """Return a group that only this module knows: for the script, torch.distributed has not been initialised."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, rank, size, options)


class Averaging:
    """Average gradients after every backward pass, whoever calls it."""

    def __init__(self, group: Any, size: int, trained: Callable[[], Iterable[Tensor]]) -> None:
        self._group = group
        self._size = size
        self._trained = trained
        self._plain = torch.autograd.backward
        torch.autograd.backward = self._backward
        register_optimizer_step_pre_hook(self._before_step)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        self._plain(*args, **kwargs)
        self._average(list(self._trained()))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Average what is trained without `prepare`: there is one copy of it on one process."""
        known = {id(param) for param in self._trained()}
        self._average([param for param in params_of(optimizer) if id(param) not in known])

    def share_token_counts(self) -> None:
        """Let `Trainer` of transformers divide by the tokens of all data ranks, as it does on several processes."""
        module = sys.modules.get("transformers.trainer")
        if module is None:
            return
        plain = module.Trainer.get_batch_samples

        def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            batches, items = plain(trainer, *args, **kwargs)
            if items is None or not trainer.args.average_tokens_across_devices:
                return batches, items
            total = torch.as_tensor(items, dtype=torch.float32).sum().reshape(1)
            self._group.allreduce([total]).wait()
            return batches, total[0] / self._size  # of the mean of the data ranks' gradients

        module.Trainer.get_batch_samples = get_batch_samples

    @torch.no_grad()
    def _average(self, params: list[Tensor]) -> None:
        """Average gradients; a parameter that only some ranks have used has a gradient on all afterwards."""
        params = [param for param in params if param.requires_grad]
        if not params:
            return
        used = torch.tensor([float(param.grad is not None) for param in params])
        self._group.allreduce([used]).wait()
        params = [param for param, ranks in zip(params, used.tolist(), strict=True) if ranks]
        dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
        for param, gradient in zip(params, dense, strict=True):
            summed = gradient.to("cpu", copy=True).contiguous()
            self._group.allreduce([summed]).wait()
            average = (summed / self._size).to(param.device)
            if param.grad is None:
                param.grad = average
            elif param.grad.is_sparse:
                param.grad = average.to_sparse()
            else:
                param.grad.copy_(average)
