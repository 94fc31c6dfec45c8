"""Models larger than memory: device maps, offload with prefetch, stages; published path of `prepare_pippy`."""

from .pipeline import prepare_pippy

__all__ = ["prepare_pippy"]
