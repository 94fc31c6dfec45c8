"""The published module `accelerate.logging`."""

from meshwright.logging import (
    MultiProcessAdapter as MultiProcessAdapter,
    get_logger as get_logger,
)
from meshwright.published import publish as _publish

_publish(__name__)
