"""The published module `accelerate.utils.tqdm`."""

from meshwright.published import publish as _publish
from meshwright.runtime.loop.bars import tqdm as tqdm

_publish(__name__)
