"""Published path of the data loading classes; they live in `accelerate.data`."""

from .data.dispatch import DataLoaderDispatcher
from .data.loaders import DataLoaderShard, SkipBatchSampler
from .data.order import HugeRandomSampler, SeedableRandomSampler
from .data.preparing import SkipDataLoader, prepare_data_loader, skip_first_batches
from .data.sharding import BatchSamplerShard, IterableDatasetShard

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
