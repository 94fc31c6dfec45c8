"""Published path of the data loading classes; they live in `accelerate.data`."""

from .data.dispatch import DataLoaderDispatcher
from .data.indices import SkipBatchSampler
from .data.order import HugeRandomSampler, SeedableRandomSampler
from .data.preparing import SkipDataLoader, prepare_data_loader, skip_first_batches
from .data.shard import DataLoaderShard
from .data.sharding import BatchSamplerShard
from .data.streams import IterableDatasetShard

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "HugeRandomSampler",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
