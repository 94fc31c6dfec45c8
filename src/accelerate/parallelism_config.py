"""Published path of `ParallelismConfig`, and the path of what belongs to it."""

from .config.plugins.parallelism import ParallelismConfig, PipelineConfig

__all__ = ["ParallelismConfig", "PipelineConfig"]
