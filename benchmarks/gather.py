"""An evaluation loop on two processes: `gather_for_metrics` and a bare `all_gather` into a list that is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from .interleave import Comparison, compare, timed
from .processes import run_on_two
from .task import BATCH_SIZE, accelerator, data, model


def run(rounds: int) -> list[Comparison]:
    """Measure one batch of an evaluation: load, predict, gather predictions and labels."""
    return run_on_two(on_every_rank, rounds)


def on_every_rank(rounds: int) -> list[Comparison]:
    return [
        compare(
            "evaluation batch with gather_for_metrics, 2 processes",
            lambda: timed(bare_evaluation(), dist.barrier),
            lambda: timed(our_evaluation(), dist.barrier),
            rounds=rounds,
            target=1.10,
        )
    ]


def bare_evaluation() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    samples, net = data(), DistributedDataParallel(model())
    batches = DataLoader(samples, batch_size=BATCH_SIZE, sampler=DistributedSampler(samples, shuffle=False))
    net.eval()
    predictions_by_rank = [torch.empty(BATCH_SIZE, dtype=torch.int64) for _ in range(dist.get_world_size())]
    labels_by_rank = [torch.empty(BATCH_SIZE, dtype=torch.int64) for _ in range(dist.get_world_size())]
    while True:
        for inputs, labels in batches:
            with torch.no_grad():
                predictions = net(inputs).argmax(dim=-1)
            dist.all_gather(predictions_by_rank, predictions)
            dist.all_gather(labels_by_rank, labels)
            yield torch.cat(predictions_by_rank), torch.cat(labels_by_rank)


def our_evaluation() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    accelerate = accelerator()
    net, batches = accelerate.prepare(model(), DataLoader(data(), batch_size=BATCH_SIZE))
    net.eval()
    while True:
        for inputs, labels in batches:
            with torch.no_grad():
                predictions = net(inputs).argmax(dim=-1)
            yield accelerate.gather_for_metrics((predictions, labels))
