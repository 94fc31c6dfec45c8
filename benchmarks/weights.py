"""Weights handed over from FSDP2 on two processes, and raw gathers of the same bytes in the same buckets."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import Accelerator, FullyShardedDataParallelPlugin
from meshwright.runtime.collectives.operations import all_gather_single

from .interleave import Comparison, compare
from .processes import run_on_two

SMALL = 1 << 20


def run(rounds: int) -> list[Comparison]:
    """Measure one pass over all weights."""
    return run_on_two(on_every_rank, rounds)


def model() -> nn.Module:
    """Make an embedding and layers, 168 MB together."""
    layers = [nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(8192, 1024), *layers)


def on_every_rank(rounds: int) -> list[Comparison]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net = accelerator.prepare(model())
    weights = accelerator.weights(net)
    weights.metadata()
    shards = [param.to_local().detach() for param in net.parameters()]
    large = [shard for shard in shards if 2 * shard.nbytes >= SMALL]
    packed = torch.cat([shard.flatten() for shard in shards if 2 * shard.nbytes < SMALL])

    def gather(own: Tensor) -> None:
        all_gather_single(own.new_empty(2 * own.numel()), own.view(-1))

    def raw() -> float:
        dist.barrier()
        began = perf_counter()
        for own in (packed, *large):
            gather(own)
        return perf_counter() - began

    def handed_over() -> float:
        dist.barrier()
        began = perf_counter()
        for _ in weights:
            pass
        return perf_counter() - began

    def built(lap: Callable[[], float]) -> Callable[[], Callable[[], float]]:
        return lambda: lap

    return [
        compare(
            "a pass over the weights of an FSDP2 model, beside raw gathers of the same bytes, 2 processes",
            built(raw),
            built(handed_over),
            rounds=rounds,
            target=1.10,
            warm_up=2,
        )
    ]
