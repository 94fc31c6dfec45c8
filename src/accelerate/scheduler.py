"""The published module `accelerate.scheduler`."""

from meshwright.published import publish as _publish
from meshwright.scheduler import AcceleratedScheduler as AcceleratedScheduler

_publish(__name__)
