"""The published module `accelerate.data_loader`."""

from meshwright.data.loaders.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from meshwright.data.loaders.shard import DataLoaderShard as DataLoaderShard
from meshwright.data.loaders.streams import IterableDatasetShard as IterableDatasetShard
from meshwright.data.order.indices import SkipBatchSampler as SkipBatchSampler
from meshwright.data.order.orders import SeedableRandomSampler as SeedableRandomSampler
from meshwright.data.order.sharding import BatchSamplerShard as BatchSamplerShard
from meshwright.data.preparing import (
    SkipDataLoader as SkipDataLoader,
    prepare_data_loader as prepare_data_loader,
    skip_first_batches as skip_first_batches,
)
from meshwright.published import publish as _publish

_publish(__name__)
