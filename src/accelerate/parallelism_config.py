"""The published module `accelerate.parallelism_config`."""

from meshwright.config.plugins.parallelism import ParallelismConfig as ParallelismConfig
from meshwright.published import publish as _publish

_publish(__name__)
