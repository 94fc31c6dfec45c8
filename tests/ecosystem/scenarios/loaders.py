"""datasets: map-style, streamed, and split by node, through prepared loaders: which samples came, and which counted."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from tiny import from_all_ranks, report
from torch.utils.data import DataLoader

from accelerate import Accelerator

NUM_SAMPLES = 48

accelerator = Accelerator(cpu=True)
data = Dataset.from_dict({"x": list(range(NUM_SAMPLES))}).with_format("torch")
odd = Dataset.from_dict({"x": list(range(NUM_SAMPLES - 5))}).with_format("torch")


def samples(dataset: Any, **options: Any) -> dict[str, Any]:
    """Return what all ranks were given in an epoch, and what `gather_for_metrics` made of it."""
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4, **options))
    given, counted = [], []
    for batch in loader:
        given += batch["x"].tolist()
        counted += accelerator.gather_for_metrics(batch["x"]).tolist()
    per_rank = from_all_ranks(given)
    return {"given": [x for values in per_rank for x in values], "counted": counted, "each": list(map(len, per_rank))}


def mine(dataset: Any) -> Any:
    """Return this rank's part, split by the datasets library itself."""
    return split_dataset_by_node(dataset, rank=accelerator.process_index, world_size=accelerator.num_processes)


report(
    num_samples=NUM_SAMPLES,
    even={
        "map-style": samples(data),
        "map-style, shuffled": samples(data, shuffle=True),
        "map-style, mapped and shuffled": samples(data.map(lambda row: {"y": row["x"]}).shuffle(seed=0)),
        "streamed": samples(data.to_iterable_dataset(num_shards=4)),
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
        "streamed, split by node": samples(mine(odd.to_iterable_dataset(num_shards=4))),
    },
)
