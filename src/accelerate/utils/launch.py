"""The published module `accelerate.utils.launch`."""

from meshwright.launch.notebook.spawned import PrepareForLaunch as PrepareForLaunch
from meshwright.published import publish as _publish

_publish(__name__)
