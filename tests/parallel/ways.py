"""Every parallelism strategy for the small transformer, by name, and one training run for all of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.ranks import RankFailure, run_on_ranks
from tests.sizes import sized

from .small_transformer import TP_PLAN, loader, loss_of, model

GLOBAL_BATCH = 8
STEPS = sized(gate=3, nightly=20)


def _mesh(**sizes: int) -> Callable[[], dict[str, Any]]:
    plan = TP_PLAN if "tp_size" in sizes else None
    return lambda: {"parallelism_config": ParallelismConfig(tp_plan=plan, **sizes)}


def _fsdp(**fields: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(**fields)}


WAYS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "one": (1, dict),
    "ddp2": (2, dict),
    "fsdp2": (2, _fsdp()),
    "fsdp2 whole": (2, _fsdp(state_dict_type="FULL_STATE_DICT")),
    "tp2": (2, _mesh(tp_size=2)),
    "cp2": (2, _mesh(cp_size=2)),
    "fsdp4": (4, _fsdp()),
    "hsdp2x2": (4, _mesh(dp_replicate_size=2, dp_shard_size=2)),
    "fsdp2xtp2": (4, _mesh(dp_shard_size=2, tp_size=2)),
    "copies2xtp2": (4, _mesh(dp_replicate_size=2, tp_size=2)),
    "fsdp2xcp2": (4, _mesh(dp_shard_size=2, cp_size=2)),
    "pp2": (2, _mesh(pp_size=2)),
    "pp2xfsdp2": (4, _mesh(pp_size=2, dp_shard_size=2)),
}
"""Name -> number of processes, and the arguments of the Accelerator."""


def run(
    way: str,
    *,
    steps: int = STEPS,
    load_from: str | None = None,
    save_to: str | None = None,
    clip: float | None = None,
    accumulation: int = 1,
    tied: bool = False,
    model_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[float]:
    """Train, and return the mean loss of every batch of 8 samples, the same on every process."""
    if "cp" in way:
        from .mesh.context import cpu_attention

        cpu_attention.register()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **{**WAYS[way][1](), **options})
    net = model(tied=tied, **(model_options or {}))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, batches = accelerator.prepare(
        net, optimizer, loader(GLOBAL_BATCH // accelerator.strategy.num_data_ranks)
    )
    if load_from is not None:
        accelerator.resume(load_from)
    losses = []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        with accelerator.accumulate(net):
            loss = passes(accelerator, way, net, inputs, targets)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if save_to is not None:
        accelerator.save_state(save_to)
    return losses


def passes(accelerator: Accelerator, way: str, net: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Run the forward and the backward pass of a batch, and return the loss of this process."""
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[0], -1).contiguous()
    everything = [inputs, targets, positions]
    with accelerator.maybe_context_parallel(
        buffers=everything, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(everything)
    ):
        if "pp" in way:
            return accelerator.forward_backward(net, inputs, positions, target=targets, loss_fn=loss_of)
        loss = loss_of(net(inputs, positions), targets)
        accelerator.backward(loss)
        return loss


def train(way: str, **options: Any) -> list[list[float]]:
    """Train on as many processes as the strategy needs, and return the losses that each of them saw.

    torch's ring attention over gloo has ended a process by a memory fault, once in about 1,600 worlds (torch 2.13, a
    CPU; neither valgrind nor glibc's heap checks find anything): such a world gets one more try, and a warning.
    """
    try:
        return run_on_ranks(WAYS[way][0], run, way=way, **options)
    except RankFailure as failure:
        if "cp" not in way or not re.search(r"exit code -(6|11)\b", str(failure)):
            raise
        warnings.warn(f"{way}: {failure}", stacklevel=2)
        return run_on_ranks(WAYS[way][0], run, way=way, **options)
