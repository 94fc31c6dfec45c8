"""datasets: map-style, streamed, and split by node, through prepared loaders: which samples came, and which counted.

A fingerprint that differs between ranks, and columns that every rank draws for itself, are no split.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from tiny import from_all_ranks, report
from torch.utils.data import DataLoader

from accelerate import Accelerator

NUM_SAMPLES = 48

accelerator = Accelerator(cpu=True)
data = Dataset.from_dict({"x": list(range(NUM_SAMPLES))}).with_format("torch")
odd = Dataset.from_dict({"x": list(range(NUM_SAMPLES - 5))}).with_format("torch")


def samples(dataset: Any, dispatch: bool | None = None, **options: Any) -> dict[str, Any]:
    """Return what all ranks were given in an epoch, and what `gather_for_metrics` made of it."""
    accelerator.dataloader_config.dispatch_batches = dispatch
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, **options))
    given, counted = [], []
    for batch in loader:
        given += batch["x"].tolist()
        counted += accelerator.gather_for_metrics(batch["x"]).tolist()
    per_rank = from_all_ranks(given)
    return {"given": [x for values in per_rank for x in values], "counted": counted, "each": list(map(len, per_rank))}


def as_tensor(rows: dict[str, Any]) -> torch.Tensor:
    """Return the samples of a batch."""
    return torch.as_tensor(rows["x"])


def noise(rows: dict[str, Any]) -> list[float]:
    """Return a number per sample that every rank draws for itself."""
    return [draws.random() for _ in rows["x"]]


def noted(row: dict[str, Any]) -> dict[str, Any]:
    """Count what this rank reads."""
    reads.append(1)
    return row


def mine(dataset: Any) -> Any:
    """Return this rank's part, split by the datasets library itself."""
    return split_dataset_by_node(dataset, rank=accelerator.process_index, world_size=accelerator.num_processes)


arguments = SimpleNamespace(limit=NUM_SAMPLES, rank=accelerator.process_index)  # as TrainingArguments hold the rank
unpicklable = (number for number in range(3))
reads: list[int] = []
draws = random.Random(accelerator.process_index)


report(
    num_samples=NUM_SAMPLES,
    even={
        "map-style": samples(data),
        "map-style, shuffled": samples(data, shuffle=True),
        "map-style, mapped and shuffled": samples(data.map(lambda row: {"y": row["x"]}).shuffle(seed=0)),
        "filtered by a function that holds the rank": samples(data.filter(lambda row: row["x"] < arguments.limit)),
        "mapped by a function that cannot be pickled": samples(data.map(lambda row: {"y": (unpicklable, row["x"])[1]})),
        "mapped at random": samples(data.map(lambda row: {"noise": draws.random()})),
        "transformed at random": samples(
            data.with_transform(lambda rows: {"x": as_tensor(rows), "noise": noise(rows)})
        ),
        "streamed": samples(data.to_iterable_dataset(num_shards=4)),
        "streamed by files": samples(data.to_iterable_dataset(num_shards=4).map(noted), dispatch=False),
        "streamed, shuffled": samples(data.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=8)),
        "streamed, two workers": samples(data.to_iterable_dataset(num_shards=4), num_workers=2),
        "split by node": samples(mine(data)),
        "streamed, split by node": samples(mine(data.to_iterable_dataset(num_shards=4))),
        "streamed in one shard, split by node": samples(mine(data.to_iterable_dataset(num_shards=1))),
    },
    odd={
        "map-style": samples(odd),
        "map-style, shuffled": samples(odd, shuffle=True),
        "streamed": samples(odd.to_iterable_dataset(num_shards=4)),
        "split by node": samples(mine(odd)),
        "streamed by files": samples(odd.to_iterable_dataset(num_shards=3), dispatch=False),
        "streamed, split by node": samples(mine(odd.to_iterable_dataset(num_shards=4))),
    },
    reads=from_all_ranks(len(reads)),
)
