"""Published path of the data loading classes; they live in `accelerate.data`."""

from .data.loaders.dispatch import DataLoaderDispatcher
from .data.loaders.shard import DataLoaderShard
from .data.loaders.streams import IterableDatasetShard
from .data.order.indices import SkipBatchSampler
from .data.order.orders import HugeRandomSampler, SeedableRandomSampler
from .data.order.sharding import BatchSamplerShard
from .data.preparing import SkipDataLoader, prepare_data_loader, skip_first_batches

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
