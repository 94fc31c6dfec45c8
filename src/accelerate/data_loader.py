"""Published path of the data loading classes; they live in `accelerate.data`."""

from .data.loaders import DataLoaderShard, SkipBatchSampler, prepare_data_loader, skip_first_batches
from .data.order import SeedableRandomSampler
from .data.sharding import BatchSamplerShard, IterableDatasetShard

__all__ = [
    "BatchSamplerShard",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "prepare_data_loader",
    "skip_first_batches",
]
