"""The published module `accelerate.commands.config.config_args`."""

from meshwright.config.launch.cluster_config import (
    BaseConfig as BaseConfig,
    ClusterConfig as ClusterConfig,
    SageMakerConfig as SageMakerConfig,
    cache_dir as cache_dir,
    default_config_file as default_config_file,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file,
    hf_cache_home as hf_cache_home,
    load_config_from_file as load_config_from_file,
)
from meshwright.published import publish as _publish

_publish(__name__)
