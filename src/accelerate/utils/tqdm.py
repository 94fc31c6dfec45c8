"""Published path of progress bars; they live in `accelerate.runtime.loop.bars`."""

from ..runtime.loop.bars import tqdm

__all__ = ["tqdm"]
