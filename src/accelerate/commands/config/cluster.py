"""The published module `accelerate.commands.config.cluster`."""

from meshwright.commands.config.cluster import get_cluster_input as get_cluster_input
from meshwright.published import publish as _publish

from .config_args import ClusterConfig as ClusterConfig

_publish(__name__)
